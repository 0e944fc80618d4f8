"""Stream a chat through the OpenAI client.

Nothing in it is specific to DFLASH. Speculation shows only in the chunks: each holds the tokens of one block.

    python examples/openai_stream.py [URL]
"""

import sys

from openai import OpenAI


def main(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model="default",  # one model is served, under any name
        messages=[{"role": "user", "content": "Write a function: Return the last item of a list."}],
        max_tokens=128,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks, usage = 0, None
    for chunk in stream:
        for choice in chunk.choices:  # the last chunk has the usage and no choices
            text = choice.delta.content or ""
            chunks += bool(text)
            print(text, end="", flush=True)
        usage = chunk.usage or usage
    print(f"\n\n{usage.completion_tokens} tokens in {chunks} chunks")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000")
