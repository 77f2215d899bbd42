// A cursor for the crash harness in Go: the whole state in one file, which persist replaces. One line is missing.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
)

type request struct {
	Op, Directory         string
	Ledgers               map[string]int
	Number, Ledger, Entry int
}

var (
	directory string
	ledgers   map[string]int
	acked     = [][3]int{}
	unsaved   = []int{}
)

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func answer(fields map[string]any) {
	line, err := json.Marshal(fields)
	check(err)
	_, err = os.Stdout.Write(append(line, '\n'))
	check(err)
}

func recoverState(asked request) {
	directory, ledgers = asked.Directory, asked.Ledgers
	stored, err := os.ReadFile(filepath.Join(directory, "acked.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	check(err)
	check(json.Unmarshal(stored, &acked))
}

func syncDirectory() {
	names, err := os.Open(directory)
	check(err)
	check(names.Sync())
	check(names.Close())
}

func persist() {
	state, err := json.Marshal(acked)
	check(err)
	file, err := os.Create(filepath.Join(directory, "acked.new"))
	check(err)
	_, err = file.Write(state)
	check(err)
	check(file.Sync())
	check(file.Close())
	check(os.Rename(filepath.Join(directory, "acked.new"), filepath.Join(directory, "acked.json")))
}

func markDelete(ledger, entry int) {
	for text, count := range ledgers {
		lower, err := strconv.Atoi(text)
		check(err)
		if lower < ledger {
			acked = append(acked, [3]int{lower, 0, count})
		}
	}
	acked = append(acked, [3]int{ledger, 0, entry + 1})
}

func main() {
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var asked request
		check(json.Unmarshal(lines.Bytes(), &asked))
		switch asked.Op {
		case "start":
			recoverState(asked)
			syncDirectory()
			answer(map[string]any{"ready": true})
			continue
		case "recover":
			recoverState(asked)
			answer(map[string]any{"acked": acked})
			continue
		case "report":
			answer(map[string]any{"acked": acked})
			continue
		case "ack":
			acked = append(acked, [3]int{asked.Ledger, asked.Entry, asked.Entry + 1})
			unsaved = append(unsaved, asked.Number)
		case "mark_delete":
			markDelete(asked.Ledger, asked.Entry)
			unsaved = append(unsaved, asked.Number)
		case "persist":
			persist()
			answer(map[string]any{"durable": unsaved})
			unsaved = []int{}
		}
		answer(map[string]any{"accepted": asked.Number})
	}
}
