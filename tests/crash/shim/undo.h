/* Writes that are not on the disk: an undo log of each file since its last good sync, for shim.c.
 *
 * When a sync fails, the kernel's rule holds: the pages count as clean, can still be read, and are not on the disk,
 * whatever later syncs say (https://wiki.postgresql.org/wiki/Fsync_Errors); only writing them again brings them there.
 * A process that has the clean pages dropped (posix_fadvise) reads the disk. Once the process has ended,
 * `ackstate_fault_undo` puts the bytes of the disk back. A truncation counts as durable at once, as on a kinder disk.
 */
enum { RECORDS_MAX = 16384, HEAP_BYTES = 64 << 20, WHERE_IT_STANDS = -1, SECTOR = 512 };

/* A range of a file whose bytes differ between the kernel's cache and the disk. */
struct record {
    dev_t device;
    ino_t inode;
    off_t offset, size, file_size_before;
    size_t old_bytes;  /* Where in the heap. */
    off_t old_size;    /* How many of them; the rest lay beyond the end of the file. */
    int is_lost;       /* A sync of it failed: only writing it again can bring it to the disk. */
};

struct shared {
    pid_t armed;  /* The process whose calls count; 0 for none. */
    char directory[PATH_MAX];
    size_t directory_length;
    long trip_at, lasts, count, dies_at; /* Killed before call `dies_at`, whatever it is; 0 for never. */
    int action; /* An enum action. */
    int error;
    char call[16], path[PATH_MAX]; /* The call that the fault met; empty while it met none. */
    ino_t full_inode;              /* A file that took half of a write: the next one fails. */
    int overflowed;                /* The undo log has no room left. */
    long record_count;
    size_t heap_used;
    struct record records[RECORDS_MAX];
    unsigned char heap[HEAP_BYTES];
};

static struct shared *shared;

static int is_of(const struct record *record, const struct stat *stat) {
    return record->inode == stat->st_ino && record->device == stat->st_dev;
}

/* Insert a record; they are in the order of the writes, because undoing goes the other way. */
static void insert(long at, const struct record *record) {
    if (shared->record_count == RECORDS_MAX) {
        shared->overflowed = 1;
        return;
    }
    struct record *place = &shared->records[at];
    memmove(place + 1, place, (shared->record_count++ - at) * sizeof *place);
    *place = *record;
}

static void discard_empty(void) {
    long kept = 0;
    for (long i = 0; i < shared->record_count; i++)
        if (shared->records[i].size > 0) shared->records[kept++] = shared->records[i];
    shared->record_count = kept;
}

static void keep_bytes(int file, struct record *record) {
    if (shared->heap_used + record->old_size > HEAP_BYTES) {
        shared->overflowed = 1, record->old_size = 0;
        return;
    }
    char name[40];
    snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    int reader = syscall(SYS_openat, AT_FDCWD, name, O_RDONLY | O_CLOEXEC, 0);
    record->old_bytes = shared->heap_used;
    if (reader < 0 || syscall(SYS_pread64, reader, shared->heap + shared->heap_used, record->old_size,
                              record->offset) != record->old_size)
        shared->overflowed = 1;
    if (reader >= 0) close(reader);
    shared->heap_used += record->old_size;
}

/* Note the bytes at the place of the next write. */
static void remember(int file, off_t offset, size_t size) {
    struct stat stat;
    if (size == 0 || fstat(file, &stat) != 0 || !S_ISREG(stat.st_mode)) return;
    if (fcntl(file, F_GETFL) & O_APPEND) offset = stat.st_size;
    else if (offset == WHERE_IT_STANDS) offset = lseek(file, 0, SEEK_CUR);
    struct record record = {stat.st_dev, stat.st_ino, offset, size, stat.st_size, 0, 0, 0};
    if (offset < stat.st_size) {
        record.old_size = stat.st_size - offset < (off_t)size ? stat.st_size - offset : (off_t)size;
        keep_bytes(file, &record);
    }
    insert(shared->record_count, &record);
}

/* Take a range that is on the disk now out of one that was lost; the part behind it becomes a record of its own. */
static void subtract(long place, off_t first, off_t end) {
    struct record *lost = &shared->records[place];
    off_t lost_end = lost->offset + lost->size;
    if (first >= lost_end || end <= lost->offset) return;
    if (end < lost_end) {
        struct record behind = *lost;
        off_t passed = end - lost->offset;
        behind.offset = end, behind.size = lost_end - end;
        behind.old_bytes += passed < lost->old_size ? passed : lost->old_size;
        behind.old_size = passed < lost->old_size ? lost->old_size - passed : 0;
        insert(place + 1, &behind);
    }
    lost->size = first > lost->offset ? first - lost->offset : 0;
    if (lost->old_size > lost->size) lost->old_size = lost->size;
}

/* A sync succeeded: writes since the last one are on the disk, in whole sectors; lost ones are not. */
static void settle(int file) {
    struct stat stat;
    if (fstat(file, &stat) != 0) return;
    for (long i = shared->record_count - 1; i >= 0; i--) {
        struct record written = shared->records[i];
        if (!is_of(&written, &stat) || written.is_lost) continue;
        off_t first = written.offset / SECTOR * SECTOR;
        off_t end = (written.offset + written.size + SECTOR - 1) / SECTOR * SECTOR;
        shared->records[i].size = 0;
        for (long j = i - 1; j >= 0; j--)
            if (is_of(&shared->records[j], &stat) && shared->records[j].is_lost)
                subtract(j, first, end);
    }
    discard_empty();
}

static void lose(int file) {
    struct stat stat;
    if (fstat(file, &stat) != 0) return;
    for (long i = 0; i < shared->record_count; i++)
        if (is_of(&shared->records[i], &stat)) shared->records[i].is_lost = 1;
}

/* A file was cut: nothing is left to undo beyond its new end. */
static void cut(const struct stat *stat, off_t size) {
    for (long i = 0; i < shared->record_count; i++) {
        struct record *record = &shared->records[i];
        if (!is_of(record, stat) || record->offset + record->size <= size) continue;
        record->size = size > record->offset ? size - record->offset : 0;
        if (record->old_size > record->size) record->old_size = record->size;
        if (record->file_size_before > size) record->file_size_before = size;
    }
    discard_empty();
}

static void put_back(int file, const struct record *record, int shrinks) {
    static const char zeros[4096];
    struct stat now;
    if (fstat(file, &now) != 0 || record->offset >= now.st_size) return;
    off_t end = record->offset + record->size;
    if (shrinks && end >= now.st_size && record->file_size_before < end) {
        if (syscall(SYS_ftruncate, file, record->file_size_before) != 0) abort();
        end = record->file_size_before;
    }
    off_t old_end = record->offset + record->old_size;
    for (off_t at = record->offset; at < end;) {
        off_t left = (at < old_end ? old_end : end) - at;
        if (left > end - at) left = end - at;
        if (at >= old_end && left > (off_t)sizeof zeros) left = sizeof zeros;
        const void *from = at < old_end ? (const void *)(shared->heap + record->old_bytes + (at - record->offset)) : zeros;
        ssize_t written = syscall(SYS_pwrite64, file, from, left, at);
        if (written <= 0) abort();
        at += written;
    }
}

/* The clean pages of a file are dropped: where a sync failed, the disk is read from now on. Unsynced pages stay, and
 * those beside them here, too. */
static void forget_lost(int file) {
    struct stat stat;
    if (fstat(file, &stat) != 0) return;
    for (long i = 0; i < shared->record_count; i++)
        if (is_of(&shared->records[i], &stat) && !shared->records[i].is_lost) return;
    char name[40];
    snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    int writer = syscall(SYS_openat, AT_FDCWD, name, O_RDWR | O_CLOEXEC, 0);
    if (writer < 0) return;
    for (long i = shared->record_count - 1; i >= 0; i--)
        if (is_of(&shared->records[i], &stat)) put_back(writer, &shared->records[i], 0), shared->records[i].size = 0;
    close(writer);
    discard_empty();
}

/* Give a file the bytes that are on the disk; bytes beyond its old end become zeros, or goes if `shrinks`.
 * Returns how many ranges were put back; -1 if it cannot be opened. */
long ackstate_fault_undo(const char *path, int shrinks) {
    int file = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0);
    struct stat stat;
    if (file < 0 || fstat(file, &stat) != 0) return -1;
    long found = 0;
    for (long i = shared->record_count - 1; i >= 0; i--) {
        const struct record *record = &shared->records[i];
        if (record->inode != stat.st_ino || record->device != stat.st_dev) continue;
        put_back(file, record, shrinks);
        found++;
    }
    close(file);
    return found;
}
