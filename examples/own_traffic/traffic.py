"""Three narrow kinds of requests, made from templates, and a client that sends them.

    python examples/own_traffic/traffic.py URL KIND --requests 100 [--seed 1] [--no-record]

`sql` asks for queries over one schema, `mails` for replies of one shop, `tests` for tests of one library.
The last line printed has the tokens of a cycle, the bonus token included. Seed 0 is for requests that no
draft is trained on: a fifth of all texts, which no other seed has.
"""

import argparse
import json
import random
import statistics
import urllib.request
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

SCHEMA = """books(id, title, author_id, genre, price, published)
authors(id, name, country, born)
orders(id, customer_id, book_id, quantity, ordered_on, status)
customers(id, name, city, joined_on)"""
FUNCTIONS = """merge(intervals): sorted intervals without overlaps
overlaps(a, b): whether two intervals share a point
gaps(intervals): the intervals between them
length(interval): end minus start, and 0 for an empty interval
shift(interval, by): the interval moved by a number
clip(interval, low, high): the part inside the bounds, or None
contains(interval, point): whether a point lies inside, ends included
split(interval, at): two intervals that meet at a point
union(a, b): one interval, or ValueError if they are apart
intersection(a, b): the common part, or None
scale(interval, factor): both ends multiplied by a factor
midpoint(interval): the point in the middle
parse(text): the interval of a text such as '3..7', or ValueError
render(interval): the text of an interval, such as '3..7'
cover(points): the shortest interval that holds all points
total(intervals): the length of all intervals, overlaps counted once""".splitlines()
WORDS = {
    "genre": "poetry,crime,travel,history,science,fantasy,cooking,biography,drama,art".split(","),
    "country": "Norway,Kenya,Chile,Japan,Italy,Canada,India,Poland,Ghana,Peru".split(","),
    "city": "Oslo,Leeds,Turin,Lima,Porto,Graz,Cork,Lyon,Ghent,Basel".split(","),
    "status": "open,shipped,returned,cancelled,paid".split(","),
    "item": "a garden hose,a rose pruner,a wheelbarrow,tulip bulbs,a rain barrel,a lawn mower,seed trays,"
    "a watering can,a garden bench,a compost bin,bird food,a leaf rake".split(","),
    "trouble": "arrived broken,has not arrived,has the wrong colour,is too small,came without its manual,"
    "stopped working after a week,was delivered twice,is not the one I ordered".split(","),
    "wish": "a refund,a new one,a discount,a spare part,an exchange,to cancel the order".split(","),
    "tone": "I am rather annoyed.,Thank you for your help.,Please answer soon.,This is my second mail.,"
    "I have been a customer for years.".split(","),
    "name": "Ana,Ben,Chloe,David,Elif,Finn,Grace,Hugo,Iris,Jonas,Klara,Liam,Mina,Noah,Olga,Pavel".split(","),
    "style": "pytest,unittest".split(","),
    "case": "ordinary values,an empty interval,negative numbers,equal ends,large numbers,floats,"
    "intervals that touch,one interval inside another,invalid input,a single point".split(","),
    "function": FUNCTIONS,
}
TEMPLATES = {
    "sql": [
        "List the titles of all {genre} books that cost less than {number}.",
        "How many orders with status {status} did customers from {city} make after {year}?",
        "Which authors from {country} were born before {year}? Sort them by name.",
        "Show the total quantity of {genre} books that were ordered in {year}.",
        "Find the {number} most expensive {genre} books with the names of their authors.",
        "What is the average price of books by authors from {country}?",
        "List customers from {city} who joined after {year} and have no orders.",
        "For each genre count the books published since {year}, without {genre}.",
        "Which customers from {city} ordered more than {number} books by authors from {country}?",
    ],
    "mails": [
        "Hello, my order {order} is {item}, and it {trouble}. I would like {wish}. {tone} {name}",
        "Dear team, {item} from order {order} {trouble}. Can I have {wish}? {tone} Best, {name}",
        "Hi, it is about {item}. It {trouble}. The order number is {order}. I want {wish}. {name}",
    ],
    "tests": [
        "Write {style} tests for this function, with {case} and {number} cases: {function}",
        "Write one {style} test of {case} for: {function}. Use the numbers {number} and {order}.",
    ],
}
INSTRUCTIONS = {
    "sql": f"Answer with one SQL query. The tables are:\n{SCHEMA}\n\n",
    "mails": "You work for the garden shop Larkfield. Write a short, polite reply to this mail:\n\n",
    "tests": "You write tests for the Python library `spans`, whose intervals are pairs of numbers.\n\n",
}
UNSEEN = 0  # the seed of requests that no draft is trained on


def questions(kind: str, seed: int) -> Iterator[str]:
    """Yield different requests of one kind, without an end. Those of seed 0 have no other seed."""
    dice, seen = random.Random(f"{kind} {seed}"), set()
    while True:
        values = {name: dice.choice(words) for name, words in WORDS.items()}
        values |= {"number": dice.randint(2, 60), "year": dice.randint(1950, 2024)}
        text = dice.choice(TEMPLATES[kind]).format(order=dice.randint(10000, 99999), **values)
        is_unseen = zlib.crc32(text.encode()) % 5 == 0
        if text not in seen and is_unseen == (seed == UNSEEN):
            seen.add(text)
            yield INSTRUCTIONS[kind] + text


def post(url: str, body: dict) -> dict:
    """Send a JSON body, and return the answer's."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=1800) as response:
        return json.load(response)


def ask(
    url: str, prompts: list[str], is_recorded: bool, max_tokens: int = 96, in_flight: int = 8
) -> list[float]:
    """Send prompts as greedy chats, some at a time, and return the tokens of a cycle in each answer."""
    bodies = [
        {
            "model": "default",
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": max_tokens,
            "return_meta_info": True,
            "custom_params": {"speculative_record": is_recorded},
        }
        for prompt in prompts
    ]
    with ThreadPoolExecutor(in_flight) as pool:
        answers = list(pool.map(lambda body: post(f"{url}/v1/chat/completions", body), bodies))
    metas = [answer["choices"][0]["meta_info"] for answer in answers]
    return [meta["completion_tokens"] / max(1, meta["spec_verify_ct"]) for meta in metas]


def send(
    url: str, kind: str, count: int, seed: int, is_recorded: bool = True, max_tokens: int = 96
) -> list[float]:
    """Send requests of one kind, and return the tokens of a cycle in each answer."""
    return ask(url, list(islice(questions(kind, seed), count)), is_recorded, max_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("url")
    parser.add_argument("kind", choices=TEMPLATES)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    lengths = send(args.url, args.kind, args.requests, args.seed, not args.no_record, args.max_tokens)
    print(f"{args.requests} requests, accept length {statistics.mean(lengths):.3f}")


if __name__ == "__main__":
    main()
