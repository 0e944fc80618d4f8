"""Texts whose characters take several bytes, with words and code between them."""

import random

SCRIPTS = {
    "Chinese": "你好，世界！今天讨论函数 read_config 的实现。首先打开文件，然后解析 JSON。\n出错返回 None。",
    "Japanese": "def f(x):  # 引数 x を二倍にして返す\n    return x * 2  # 結果。テスト test も書く。",
    "Korean": "안녕하세요, 오늘은 API 문서를 정리합니다.\n예제 code 를 보세요. x = 1",
    "Arabic": "مرحبا بالعالم، هذا code بلغة python.\nالنتيجة: x = ٣ ثم return.",
    "Devanagari": "नमस्ते दुनिया, यह code पायथन में है।\nपरिणाम x = ३ और return क्षत्रिय।",
    "emoji": "Sure! 👍🏽 Here is the plan 🎉: first ☕, then 🏃‍♀️ and 🇫🇷 flags 👩‍👩‍👧. Done ✅\nok 😀😀 end.",
}


def text_of(draw: random.Random) -> str:
    """A text of one script, or characters of all of them in any order."""
    if draw.random() < 0.5:
        text = draw.choice([*SCRIPTS.values()])
        begin = draw.randrange(len(text) // 2)
        return text[begin : begin + draw.randrange(12, 48)]
    letters = "".join(SCRIPTS.values())
    return "".join(draw.choice(letters) for _ in range(draw.randrange(8, 32)))
