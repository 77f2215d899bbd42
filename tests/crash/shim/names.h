/* Which names are not on the disk: each made or changed since the last good sync of its directory, for shim.c.
 *
 * A power cut takes them back, the newest first (`FaultShim.lose_unsynced`): a file or directory that was created is
 * gone, one that was renamed has its old name. POSIX allows that, whatever was synced of the files. ext4 is kinder: with
 * a sync of any file it writes all names that were changed before. Counted as durable at once are a removal, and a
 * rename that replaces something.
 */
enum { NAMES_MAX = 1024, NAME_BYTES = 512 };

struct name {
    dev_t device;
    ino_t directory, inode;
    char path[NAME_BYTES], old_path[NAME_BYTES]; /* The old one is empty for a new file. */
};

struct names {
    long count;
    struct name list[NAMES_MAX];
};

static struct names *names;

/* Note that a path leads to something new, if it does; `old_path` is NULL for a new file. */
static void note_name(const char *path, const char *old_path) {
    struct stat found, directory;
    char parent[PATH_MAX];
    snprintf(parent, sizeof parent, "%s", path);
    char *slash = strrchr(parent, '/');
    if (slash == NULL || fstatat(AT_FDCWD, path, &found, AT_SYMLINK_NOFOLLOW) != 0) return;
    *slash = 0;
    if (fstatat(AT_FDCWD, parent, &directory, 0) != 0) return;
    if (names->count == NAMES_MAX || strlen(path) >= NAME_BYTES || (old_path && strlen(old_path) >= NAME_BYTES)) {
        shared->overflowed = 1;
        return;
    }
    struct name *name = &names->list[names->count++];
    name->device = directory.st_dev, name->directory = directory.st_ino, name->inode = found.st_ino;
    strcpy(name->path, path);
    strcpy(name->old_path, old_path ? old_path : "");
}

/* A directory was synced: the names in it are on the disk. */
static void settle_names(int file) {
    struct stat stat;
    if (fstat(file, &stat) != 0 || !S_ISDIR(stat.st_mode)) return;
    long kept = 0;
    for (long i = 0; i < names->count; i++)
        if (names->list[i].directory != stat.st_ino || names->list[i].device != stat.st_dev)
            names->list[kept++] = names->list[i];
    names->count = kept;
}

static int exists(int directory, const char *name) {
    struct stat stat;
    return fstatat(directory, name, &stat, AT_SYMLINK_NOFOLLOW) == 0;
}

/* ---- Called by the harness: from 0, the oldest ---- */

long ackstate_fault_name_count(void) { return names->count; }
const char *ackstate_fault_name(long at) { return names->list[at].path; }
const char *ackstate_fault_old_name(long at) { return names->list[at].old_path; }
unsigned long ackstate_fault_name_inode(long at) { return names->list[at].inode; }
