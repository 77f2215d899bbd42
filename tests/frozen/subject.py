"""A user's cursor for `ackstate crash --subject`: JSON lines, a log of acks; `unsynced` and `early` err."""

import json
import os
import sys
from pathlib import Path

kind, acked, unsaved = sys.argv[1], [], []


def answer(**told):
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


for line in sys.stdin:
    asked = json.loads(line)
    match asked["op"]:
        case "start" | "recover":
            ledgers = {int(ledger): count for ledger, count in asked["ledgers"].items()}
            log = (Path(asked["directory"]) / "log").open("a+b")
            log.seek(0)
            whole = 0
            for row in log:
                if not row.endswith(b"]\n") or row.count(b"[") != 1:
                    break
                acked.append(json.loads(row))
                whole += len(row)
            log.truncate(whole)
            os.fsync(log.fileno())
            names = os.open(asked["directory"], os.O_RDONLY)
            os.fsync(names)
            os.close(names)
            answer(**({"ready": True} if asked["op"] == "start" else {"acked": acked}))
        case "ack" | "mark_delete":
            ledger, entry = asked["ledger"], asked["entry"]
            runs = [[ledger, entry if asked["op"] == "ack" else 0, entry + 1]]
            if asked["op"] == "mark_delete":
                runs += [[lower, 0, count] for lower, count in ledgers.items() if lower < ledger]
            log.write(b"".join(json.dumps(run).encode() + b"\n" for run in runs))
            acked += runs
            unsaved.append(asked["number"])
            answer(accepted=asked["number"])
            if kind == "early":  # It promises what its buffer holds.
                answer(durable=[unsaved.pop()])
        case "persist":
            log.flush()
            if kind != "unsynced":
                os.fsync(log.fileno())
            answer(durable=unsaved)
            unsaved = []
            answer(accepted=asked["number"])
        case "report":
            answer(acked=acked)
