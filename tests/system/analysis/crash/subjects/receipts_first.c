/* A subject that sends receipts before it writes; compiled with WRITES_FIRST, after it. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { RUNS_MAX = 100000, NUMBERS_MAX = 10000, LEDGERS_MAX = 100 };

static int acked[RUNS_MAX][3], acked_count, numbers[NUMBERS_MAX], number_count;
static int ledgers[LEDGERS_MAX], entry_counts[LEDGERS_MAX], ledger_count;
static char path[4096], new_path[4200], line[1 << 16], answer[1 << 22];

static void say(const char *text) {
    if (write(1, text, strlen(text)) < 0) exit(1);
}

static void add(int ledger, int first, int end) {
    acked[acked_count][0] = ledger, acked[acked_count][1] = first, acked[acked_count++][2] = end;
}

static void report(void) {
    int length = sprintf(answer, "{\"acked\":[");
    for (int i = 0; i < acked_count; i++)
        length += sprintf(answer + length, "%s[%d,%d,%d]", i ? "," : "", acked[i][0], acked[i][1], acked[i][2]);
    sprintf(answer + length, "]}\n");
    say(answer);
}

static void receipts(void) {
    int length = sprintf(answer, "{\"durable\":[");
    for (int i = 0; i < number_count; i++) length += sprintf(answer + length, "%s%d", i ? "," : "", numbers[i]);
    sprintf(answer + length, "]}\n");
    say(answer);
    number_count = 0;
}

static void save(void) {
    FILE *file = fopen(new_path, "w");
    if (file == NULL) exit(1);
    for (int i = 0; i < acked_count; i++) fprintf(file, "%d %d %d\n", acked[i][0], acked[i][1], acked[i][2]);
    fclose(file);
    if (rename(new_path, path) != 0) exit(1);
}

static int field(const char *name) {
    const char *found = strstr(line, name);
    return found == NULL ? -1 : atoi(found + strlen(name));
}

static void begin(void) {
    char *directory = strstr(line, "\"directory\":\"") + strlen("\"directory\":\"");
    sprintf(path, "%.*s/acked", (int)strcspn(directory, "\""), directory);
    sprintf(new_path, "%s.new", path);
    char *next = strstr(line, "\"ledgers\":{") + strlen("\"ledgers\":{");
    while (*next == '"') {
        ledgers[ledger_count] = (int)strtol(next + 1, &next, 10);
        entry_counts[ledger_count++] = (int)strtol(next + 2, &next, 10);
        next += *next == ',';
    }
    FILE *file = fopen(path, "r");
    if (file == NULL) return;
    int *run = acked[0];
    while (fscanf(file, "%d %d %d", run, run + 1, run + 2) == 3) run = acked[++acked_count];
    fclose(file);
}

int main(void) {
    while (fgets(line, sizeof line, stdin) != NULL) {
        int number = field("\"number\":"), ledger = field("\"ledger\":"), entry = field("\"entry\":");
        if (strstr(line, "\"report\"") != NULL) {
            report();
            continue;
        }
        if (number < 0) {
            begin();
            if (strstr(line, "\"start\"") != NULL) say("{\"ready\":true}\n");
            else report();
            continue;
        }
        if (strstr(line, "\"persist\"") != NULL) {
#ifdef WRITES_FIRST
            save();
            receipts();
#else
            receipts();
            save();
#endif
        } else {
            int is_all = strstr(line, "\"mark_delete\"") != NULL;
            for (int i = 0; is_all && i < ledger_count; i++)
                if (ledgers[i] < ledger) add(ledgers[i], 0, entry_counts[i]);
            add(ledger, is_all ? 0 : entry, entry + 1);
            numbers[number_count++] = number;
        }
        sprintf(answer, "{\"accepted\":%d}\n", number);
        say(answer);
    }
    return 0;
}
