// A cursor for the crash harness in Node.js: the whole state in one file, synced by persist. One thing is wrong with it.
import fs from "node:fs";
import path from "node:path";
import readline from "node:readline";

let directory, ledgers;
let acked = [];
let unsaved = [];

const answer = (fields) => fs.writeSync(1, JSON.stringify(fields) + "\n");

function sync(name) {
  const file = fs.openSync(name, "r");
  fs.fsyncSync(file);
  fs.closeSync(file);
}

function recover(asked) {
  ({ directory, ledgers } = asked);
  const name = path.join(directory, "acked.json");
  if (fs.existsSync(name)) acked = JSON.parse(fs.readFileSync(name, "utf8"));
}

function store(state) {
  const name = path.join(directory, "acked.json");
  fs.writeFileSync(name, state);
  sync(name);
  sync(directory);
}

for await (const line of readline.createInterface({ input: process.stdin })) {
  const asked = JSON.parse(line);
  const { op, number, ledger, entry } = asked;
  if (op === "start" || op === "recover") recover(asked);
  if (op === "start") answer({ ready: true });
  if (op === "recover" || op === "report") answer({ acked });
  if (op === "ack") acked.push([ledger, entry, entry + 1]);
  if (op === "mark_delete") {
    for (const [lower, count] of Object.entries(ledgers)) if (lower < ledger) acked.push([Number(lower), 0, count]);
    acked.push([ledger, 0, entry + 1]);
  }
  if (op === "persist") {
    store(JSON.stringify(acked));
    answer({ durable: unsaved });
    unsaved = [];
  } else if (number !== undefined) {
    unsaved.push(number);
  }
  if (number !== undefined) answer({ accepted: number });
}
