"""A subject without imports of the harness: sends receipts before it writes, or after it if it is told so."""

import json
import os
import sys

WRITES_FIRST = sys.argv[1:] == ["writes-first"]


def say(answer):
    os.write(1, json.dumps(answer).encode() + b"\n")


def write(path, acked):
    descriptor = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.write(descriptor, json.dumps(acked).encode())
    os.close(descriptor)
    os.rename(path + ".new", path)  # noqa: PTH104


def main():
    acked, numbers, path, ledgers = [], [], "", {}
    for line in sys.stdin:
        asked = json.loads(line)
        match asked["op"]:
            case "start" | "recover" as op:
                path, ledgers = asked["directory"] + "/acked", asked["ledgers"]
                if os.path.exists(path):  # noqa: PTH110 - without imports that write caches
                    with open(path) as file:  # noqa: PTH123
                        acked = json.load(file)
                say({"ready": True} if op == "start" else {"acked": acked})
                continue
            case "report":
                say({"acked": acked})
                continue
            case "ack":
                acked.append([asked["ledger"], asked["entry"], asked["entry"] + 1])
                numbers.append(asked["number"])
            case "mark_delete":
                acked += [[int(lower), 0, count] for lower, count in ledgers.items() if int(lower) < asked["ledger"]]
                acked.append([asked["ledger"], 0, asked["entry"] + 1])
                numbers.append(asked["number"])
            case "persist":
                if WRITES_FIRST:
                    write(path, acked)
                say({"durable": numbers})
                if not WRITES_FIRST:
                    write(path, acked)
                numbers = []
        say({"accepted": asked["number"]})


if __name__ == "__main__":
    main()
