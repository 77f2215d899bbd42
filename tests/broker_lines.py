"""Lines of a recording of the broker interceptor, and the files of killed brokers."""

from __future__ import annotations

import json
import zlib

from ackstate.analysis.trace.broker_recording import FORMAT

T0 = 1_700_000_000_000
TOPIC = "persistent://public/default/t"


def start(life="one", ts_ms=T0, **config):
    return {
        "kind": "start", "format": FORMAT, "version": 1, "ts_ms": ts_ms, "broker": "host", "life": life,
        "timer_first_ms": T0, "timer_last_ms": T0, "config": config,
    }  # fmt: skip


CONSUMER = {"kind": "subject", "subject": 0, "topic": TOPIC, "subscription": "s", "consumer": "c", "type": "Shared"}
LOG = {"kind": "subject", "subject": 1, "topic": TOPIC}


def opened(at, mark_delete="3:-1", deleted="[]"):
    ts_ms = T0 + at
    return {
        "kind": "consumer", "subject": 0, "ts_ms": ts_ms, "opened_ms": ts_ms, "mark_delete": mark_delete,
        "deleted": deleted,
    }  # fmt: skip


def sent(at, *entries, messages=1, kind="deliver"):
    subject = 1 if kind == "publish" else 0
    return {
        "kind": kind, "subject": subject, "ts_ms": T0 + at, "until_ms": T0 + at, "messages": messages,
        "entries": list(entries),
    }  # fmt: skip


def ack(at, *entries, before=(-1, -1), after=None, kind="Individual", received=None):
    return {
        "kind": "ack", "subject": 0, "ts_ms": T0 + at, "received_ms": T0 + (at if received is None else received),
        "type": kind, "before": list(before), "after": list(before if after is None else after),
        "entries": list(entries),
    }  # fmt: skip


def look(at, ledger_id, begun, written, mark_delete):
    return {
        "kind": "look", "subject": 0, "ts_ms": T0 + at, "ledger_id": ledger_id, "begun": begun, "written": written,
        "mark_delete": mark_delete,
    }  # fmt: skip


def mark(kind, at, **more):
    return {"kind": kind, "ts_ms": T0 + at, **more}


def written(directory, *lines, number=0):
    """Write a file of a killed broker, whose compressed stream has no end; return the directory."""
    directory.mkdir(exist_ok=True)
    packer = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    data = packer.compress("".join(f"{json.dumps(line)}\n" for line in lines).encode())
    (directory / f"ackstate-{number}.jsonl.gz").write_bytes(data + packer.flush(zlib.Z_SYNC_FLUSH))
    return directory
