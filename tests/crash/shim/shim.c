/* Interposes the calls that store on a disk, so that the n-th below one directory fails, stops half way, or kills.
 *
 * Loaded by LD_PRELOAD. Until it is armed, every call goes straight to the kernel. Armed, it counts the calls of the
 * process that armed it: those that store (write, pwrite, writev, fsync, fdatasync, open that creates, truncate,
 * rename, unlink, mkdir), or, for a fault of reading, those that read (read, pread). Not seen: mmap, copy_file_range,
 * sendfile, fallocate, aio and io_uring.
 *
 * Beside that it keeps the unsynced writes (undo.h) and the unsynced names (names.h), so that a power cut can follow.
 *
 * All of it lies in memory shared with forked children, so that the parent can read the calls of a killed child.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#if !defined(__linux__) || !defined(__LP64__)
#error "needs a 64-bit Linux: the calls below pass offsets in one register"
#endif

#include "undo.h"
#include "names.h"

/* As `Action` in shim.py. */
enum action { FAIL = 0, FAIL_READ = 1, SHORT = 2, TORN_KILL = 3, KILL_BEFORE = 4, KILL_AFTER = 5 };
enum fate { PASSES, FAILS, IS_HALVED, IS_TORN, DIES_AFTER };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

__attribute__((constructor)) static void begin(void) {
    size_t size = sizeof(struct shared) + sizeof(struct names);
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return;
    shared = memory;
    names = (struct names *)(shared + 1);
}

/* ---- What the harness calls ---- */

int ackstate_fault_arm(const char *directory, long trip_at, int action, int error, long lasts, long dies_at) {
    if (shared == NULL || strlen(directory) >= PATH_MAX) return -1;
    shared->armed = 0;
    strcpy(shared->directory, directory);
    shared->directory_length = strlen(directory);
    shared->trip_at = trip_at, shared->action = action, shared->error = error, shared->lasts = lasts;
    shared->dies_at = dies_at;
    shared->count = shared->record_count = names->count = 0;
    shared->heap_used = 0;
    shared->full_inode = 0;
    shared->overflowed = 0;
    shared->call[0] = shared->path[0] = 0;
    shared->armed = getpid();
    return 0;
}

void ackstate_fault_disarm(void) { shared->armed = 0; }
long ackstate_fault_count(void) { return shared->count; }
int ackstate_fault_overflowed(void) { return shared->overflowed; }
const char *ackstate_fault_call(void) { return shared->call; }
const char *ackstate_fault_path(void) { return shared->path; }

/* ---- Which calls count, and what becomes of one ---- */

static int is_armed(void) { return shared != NULL && shared->armed != 0 && shared->armed == getpid(); }

static int is_below(const char *path) {
    return strncmp(path, shared->directory, shared->directory_length) == 0 &&
           (path[shared->directory_length] == '/' || path[shared->directory_length] == 0);
}

static int path_of(int file, char *path) {
    char name[40];
    snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    ssize_t length = readlink(name, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
    return length > 0;
}

static int is_ours(int file, char *path) { return is_armed() && path_of(file, path) && is_below(path); }

/* A name below the directory, made absolute; a process that goes there by a link is not followed. */
static int is_our_name(int directory, const char *name, char *path) {
    if (!is_armed()) return 0;
    path[0] = 0;
    if (name[0] != '/') {
        if (directory == AT_FDCWD ? getcwd(path, PATH_MAX) == NULL : !path_of(directory, path)) return 0;
        strncat(path, "/", PATH_MAX - strlen(path) - 1);
    }
    strncat(path, name, PATH_MAX - strlen(path) - 1);
    return is_below(path);
}

__attribute__((noreturn)) static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

/* Count a call, and return its outcome; dies here if it is to die before the call. */
static enum fate next_fate(const char *call, const char *path) {
    long number = ++shared->count;
    if (shared->dies_at > 0 && number >= shared->dies_at) die();
    int lasts = shared->action == FAIL || shared->action == FAIL_READ;
    if (number < shared->trip_at || number >= shared->trip_at + (lasts ? shared->lasts : 1)) return PASSES;
    if (shared->call[0] == 0) {
        snprintf(shared->call, sizeof shared->call, "%s", call);
        snprintf(shared->path, sizeof shared->path, "%s", path);
    }
    int is_write = strcmp(call, "write") == 0;
    switch (shared->action) {
    case FAIL: case FAIL_READ: return FAILS;
    case SHORT: return is_write ? IS_HALVED : FAILS;
    case TORN_KILL: if (is_write) return IS_TORN; die();
    case KILL_BEFORE: die();
    case KILL_AFTER: return DIES_AFTER;
    }
    return PASSES;
}

static int counts_reads(void) { return shared->action == FAIL_READ; }

static enum fate fate_of_storing(const char *call, const char *path) {
    return counts_reads() ? PASSES : next_fate(call, path);
}

/* Fail a call that stores, or let it be made by `made` and die after it. Holds the lock from `fate_of` on. */
static long finish(enum fate fate, long result) {
    int error = errno;
    if (fate == DIES_AFTER) die();
    pthread_mutex_unlock(&lock);
    errno = error;
    return result;
}

static long refuse(void) {
    pthread_mutex_unlock(&lock);
    errno = shared->error;
    return -1;
}

/* ---- Writing and reading ---- */

static ssize_t raw_write(int file, const void *data, size_t size, off_t offset) {
    return offset == WHERE_IT_STANDS ? syscall(SYS_write, file, data, size)
                                     : syscall(SYS_pwrite64, file, data, size, offset);
}

static int is_full(int file) {
    struct stat stat;
    return shared->full_inode != 0 && fstat(file, &stat) == 0 && stat.st_ino == shared->full_inode;
}

static ssize_t store(int file, const void *data, size_t size, off_t offset) {
    char path[PATH_MAX];
    if (!is_ours(file, path)) return raw_write(file, data, size, offset);
    pthread_mutex_lock(&lock);
    enum fate fate = fate_of_storing("write", path);
    if (fate == IS_HALVED && size < 2) fate = FAILS;
    int was_full = is_full(file);
    shared->full_inode = 0;
    if (fate == FAILS || was_full) return refuse();
    struct stat stat;
    if (fate == IS_HALVED && fstat(file, &stat) == 0) shared->full_inode = stat.st_ino;
    if (fate == IS_HALVED || fate == IS_TORN) size /= 2;
    remember(file, offset, size);
    ssize_t written = raw_write(file, data, size, offset);
    return finish(fate == IS_TORN ? DIES_AFTER : fate, written);
}

ssize_t write(int file, const void *data, size_t size) { return store(file, data, size, WHERE_IT_STANDS); }
ssize_t pwrite(int file, const void *data, size_t size, off_t offset) { return store(file, data, size, offset); }
ssize_t pwrite64(int file, const void *data, size_t size, off64_t offset) { return store(file, data, size, offset); }

ssize_t writev(int file, const struct iovec *parts, int count) {
    char path[PATH_MAX];
    if (!is_ours(file, path)) return syscall(SYS_writev, file, parts, count);
    size_t size = 0;
    for (int i = 0; i < count; i++) size += parts[i].iov_len;
    char *data = malloc(size + 1), *end = data;
    if (data == NULL) return -1;
    for (int i = 0; i < count; i++) {
        memcpy(end, parts[i].iov_base, parts[i].iov_len);
        end += parts[i].iov_len;
    }
    ssize_t written = store(file, data, size, WHERE_IT_STANDS);
    int error = errno;
    free(data);
    errno = error;
    return written;
}

static ssize_t load(int file, void *data, size_t size, off_t offset) {
    char path[PATH_MAX];
    if (is_armed() && counts_reads() && is_ours(file, path)) {
        pthread_mutex_lock(&lock);
        if (next_fate("read", path) == FAILS) return refuse();
        pthread_mutex_unlock(&lock);
    }
    return offset == WHERE_IT_STANDS ? syscall(SYS_read, file, data, size)
                                     : syscall(SYS_pread64, file, data, size, offset);
}

ssize_t read(int file, void *data, size_t size) { return load(file, data, size, WHERE_IT_STANDS); }
ssize_t pread(int file, void *data, size_t size, off_t offset) { return load(file, data, size, offset); }
ssize_t pread64(int file, void *data, size_t size, off64_t offset) { return load(file, data, size, offset); }

/* ---- Syncing ---- */

static int sync_file(const char *call, long number, int file) {
    char path[PATH_MAX];
    if (!is_ours(file, path)) return syscall(number, file);
    pthread_mutex_lock(&lock);
    enum fate fate = fate_of_storing(call, path);
    if (fate == FAILS) {
        lose(file);
        return refuse();
    }
    int result = syscall(number, file);
    if (result == 0) {
        settle(file);
        settle_names(file);
    }
    return finish(fate, result);
}

int fsync(int file) { return sync_file("fsync", SYS_fsync, file); }
int fdatasync(int file) { return sync_file("fdatasync", SYS_fdatasync, file); }

int posix_fadvise(int file, off_t offset, off_t size, int advice) {
    char path[PATH_MAX];
    if (syscall(SYS_fadvise64, file, offset, size, advice) != 0) return errno;
    if (advice == POSIX_FADV_DONTNEED && is_ours(file, path)) {
        pthread_mutex_lock(&lock);
        forget_lost(file);
        pthread_mutex_unlock(&lock);
    }
    return 0;
}
int posix_fadvise64(int file, off64_t offset, off64_t size, int advice) {
    return posix_fadvise(file, offset, size, advice);
}

/* ---- Names and sizes ---- */

static int open_file(int directory, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    if (!(flags & (O_CREAT | O_TRUNC)) || !is_our_name(directory, name, path))
        return syscall(SYS_openat, directory, name, flags, mode);
    pthread_mutex_lock(&lock);
    enum fate fate = fate_of_storing("open", path);
    if (fate == FAILS) return refuse();
    int is_new = !exists(directory, name);
    int file = syscall(SYS_openat, directory, name, flags, mode);
    if (file >= 0 && is_new) note_name(path, NULL);
    struct stat stat;
    if (file >= 0 && flags & O_TRUNC && fstat(file, &stat) == 0) cut(&stat, 0);
    return finish(fate, file);
}

#define MODE_OF(flags, mode) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { \
        va_list arguments; \
        va_start(arguments, flags); \
        mode = va_arg(arguments, mode_t); \
        va_end(arguments); \
    }

int open(const char *name, int flags, ...) { MODE_OF(flags, mode) return open_file(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE_OF(flags, mode) return open_file(AT_FDCWD, name, flags, mode); }
int openat(int directory, const char *name, int flags, ...) {
    MODE_OF(flags, mode) return open_file(directory, name, flags, mode);
}
int openat64(int directory, const char *name, int flags, ...) {
    MODE_OF(flags, mode) return open_file(directory, name, flags, mode);
}
int creat(const char *name, mode_t mode) { return open_file(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *name, mode_t mode) { return creat(name, mode); }

int ftruncate(int file, off_t size) {
    char path[PATH_MAX];
    if (!is_ours(file, path)) return syscall(SYS_ftruncate, file, size);
    pthread_mutex_lock(&lock);
    enum fate fate = fate_of_storing("ftruncate", path);
    if (fate == FAILS) return refuse();
    int result = syscall(SYS_ftruncate, file, size);
    struct stat stat;
    if (result == 0 && fstat(file, &stat) == 0) cut(&stat, size);
    return finish(fate, result);
}
int ftruncate64(int file, off64_t size) { return ftruncate(file, size); }

/* Find the file of a name, if it goes with the name: another file may get its inode number. */
static int find_last_name(int directory, const char *name, struct stat *stat) {
    return fstatat(directory, name, stat, AT_SYMLINK_NOFOLLOW) == 0 && stat->st_nlink == 1;
}

int renameat(int from, const char *name, int to, const char *new_name) {
    char path[PATH_MAX], old_path[PATH_MAX];
    if (!is_our_name(to, new_name, path)) return syscall(SYS_renameat2, from, name, to, new_name, 0);
    int was_ours = is_our_name(from, name, old_path);
    pthread_mutex_lock(&lock);
    enum fate fate = fate_of_storing("rename", path);
    if (fate == FAILS) return refuse();
    struct stat replaced;
    int replaces = find_last_name(to, new_name, &replaced), is_new = !exists(to, new_name);
    int result = syscall(SYS_renameat2, from, name, to, new_name, 0);
    if (result == 0 && replaces) cut(&replaced, 0);
    if (result == 0 && is_new && was_ours) note_name(path, old_path);
    return finish(fate, result);
}
int rename(const char *name, const char *new_name) { return renameat(AT_FDCWD, name, AT_FDCWD, new_name); }

int unlinkat(int directory, const char *name, int flags) {
    char path[PATH_MAX];
    if (!is_our_name(directory, name, path)) return syscall(SYS_unlinkat, directory, name, flags);
    pthread_mutex_lock(&lock);
    enum fate fate = fate_of_storing("unlink", path);
    if (fate == FAILS) return refuse();
    struct stat removed;
    int removes = find_last_name(directory, name, &removed);
    int result = syscall(SYS_unlinkat, directory, name, flags);
    if (result == 0 && removes) cut(&removed, 0);
    return finish(fate, result);
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }

int mkdirat(int directory, const char *name, mode_t mode) {
    char path[PATH_MAX];
    if (!is_our_name(directory, name, path)) return syscall(SYS_mkdirat, directory, name, mode);
    pthread_mutex_lock(&lock);
    enum fate fate = fate_of_storing("mkdir", path);
    if (fate == FAILS) return refuse();
    long result = syscall(SYS_mkdirat, directory, name, mode);
    if (result == 0) note_name(path, NULL);
    return finish(fate, result);
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }
