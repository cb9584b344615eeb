/* A shim under the C library's file system calls, for tests/robustness/faults.py: counts the calls on files beneath one folder,
 * by kind of file and kind of call, and makes one of them (or a stretch) fail, fall short or take long.
 *
 * Loaded with LD_PRELOAD. It does nothing until a process calls faults_begin() with a table that tests/robustness/faults.py has
 * made and that its forked children share, so a count runs over all processes of a launch. What the C library does
 * inside itself does not pass here, hence fopen, fread and fwrite beside open, read and write. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN, CREATE, LIST, STAT, READ, WRITE, SYNC, RENAME, UNLINK, TRUNCATE, ALLOCATE, MKDIR, CLOSE, MMAP, COPY, CALLS };
enum { COUNT_ONLY, NO_SPACE, IO_ERROR, INTERRUPTED, SHORT, SLOW };
#define CLASSES 16

/* tests/robustness/faults.py knows this layout. */
struct table {
    char root[512];
    char patterns[CLASSES][160]; /* fnmatch, several between '|'; the first class that matches has the file */
    long kind, file_class, call, first, length, slow_us, whole_disk;
    long strikes, begun, checkpoints_before; /* so far; renames of a checkpoint to last.pt before the first strike */
    long counts[CLASSES][CALLS];
};
static struct table *table;
static __thread int inside;

static long *errno_of_kind(void) {
    static long numbers[] = {0, ENOSPC, EIO, EINTR, 0, 0};
    return &numbers[table->kind];
}

void faults_begin(const char *path) {
    int handle = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0);
    void *mapped = (void *)syscall(SYS_mmap, 0, sizeof *table, PROT_READ | PROT_WRITE, MAP_SHARED, handle, 0);
    syscall(SYS_close, handle);
    if (mapped != MAP_FAILED) table = mapped;
}

static int class_of(const char *path) {
    size_t length = strlen(table->root);
    if (!strncmp(path, "/dev/shm/lockstep-", 18)) length = strlen("/dev/shm"); /* --cache ram */
    else if (strncmp(path, table->root, length) || path[length] != '/') return -1;
    for (int i = 0; i < CLASSES; i++) {
        char patterns[160], *rest = patterns;
        memcpy(patterns, table->patterns[i], sizeof patterns);
        for (char *one; (one = strsep(&rest, "|"));)
            if (*one && !fnmatch(one, path + length + 1, 0)) return i;
    }
    return -1;
}

static int needs_space(int call) {
    return call == CREATE || call == WRITE || call == SYNC || call == ALLOCATE || call == MKDIR || call == COPY ||
           call == RENAME;
}

/* Whether the call that begins is to be disturbed. */
static int strikes(const char *path, int call) {
    int file_class = class_of(path);
    if (file_class < 0) return 0;
    long number = __atomic_add_fetch(&table->counts[file_class][call], 1, __ATOMIC_SEQ_CST);
    if (table->kind == COUNT_ONLY) return 0;
    int is_its_call = file_class == table->file_class && call == table->call;
    if (is_its_call && number == table->first) __atomic_store_n(&table->begun, 1, __ATOMIC_SEQ_CST);
    if (!table->begun) return 0;
    if (!(table->whole_disk ? needs_space(call) : is_its_call)) return 0;
    if (__atomic_add_fetch(&table->strikes, 1, __ATOMIC_SEQ_CST) > table->length) return 0;
    if (table->kind == SLOW) {
        usleep(table->slow_us);
        return 0;
    }
    return 1;
}

static int path_of(int fd, char *path, size_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, path, size - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return 1;
}

static int strikes_fd(int fd, int call) {
    char path[1024];
    if (!table || inside || fd < 3 || !path_of(fd, path, sizeof path)) return 0;
    inside = 1;
    int result = strikes(path, call);
    inside = 0;
    return result;
}

static int strikes_path(int folder, const char *name, int call) {
    char path[2048];
    if (!table || inside || !name) return 0;
    if (name[0] == '/') {
        snprintf(path, sizeof path, "%s", name);
    } else {
        char base[1024];
        if (folder == AT_FDCWD ? syscall(SYS_getcwd, base, sizeof base) <= 0 : !path_of(folder, base, sizeof base))
            return 0;
        snprintf(path, sizeof path, "%s/%s", base, name);
    }
    inside = 1;
    int result = strikes(path, call);
    inside = 0;
    return result;
}

#define REAL(name) static __typeof__(name) *real; if (!real) real = dlsym(RTLD_NEXT, #name)
#define REFUSE(value) do { errno = *errno_of_kind(); return value; } while (0)

#define OPENS(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        if (strikes_path(AT_FDCWD, path, flags & O_CREAT ? CREATE : OPEN)) REFUSE(-1); \
        return real(path, flags, mode); \
    }
OPENS(open)
OPENS(open64)
#define OPENS_AT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        if (strikes_path(folder, path, flags & O_CREAT ? CREATE : OPEN)) REFUSE(-1); \
        return real(folder, path, flags, mode); \
    }
OPENS_AT(openat)
OPENS_AT(openat64)
#define FOPENS(name) \
    FILE *name(const char *path, const char *mode) { \
        REAL(name); \
        if (strikes_path(AT_FDCWD, path, mode[0] == 'r' ? OPEN : CREATE)) REFUSE(NULL); \
        return real(path, mode); \
    }
FOPENS(fopen)
FOPENS(fopen64)

#define LISTS(name, type, argument, asks) \
    DIR *name(type argument) { \
        REAL(name); \
        if (asks) REFUSE(NULL); \
        return real(argument); \
    }
LISTS(opendir, const char *, path, strikes_path(AT_FDCWD, path, LIST))
LISTS(fdopendir, int, fd, strikes_fd(fd, LIST))

#define STATS(name, type) \
    int name(const char *path, struct type *status) { \
        REAL(name); \
        if (strikes_path(AT_FDCWD, path, STAT)) REFUSE(-1); \
        return real(path, status); \
    }
STATS(stat, stat)
STATS(stat64, stat64)
STATS(lstat, stat)
STATS(lstat64, stat64)
#define STATS_AT(name, type) \
    int name(int folder, const char *path, struct type *status, int flags) { \
        REAL(name); \
        if (strikes_path(folder, path, STAT)) REFUSE(-1); \
        return real(folder, path, status, flags); \
    }
STATS_AT(fstatat, stat)
STATS_AT(fstatat64, stat64)

static int falls_short(size_t count) { return table->kind == SHORT && count > 1; }
static int is_error(void) { return table->kind != SHORT; }

#define TRANSFERS(name, call, pointer) \
    ssize_t name(int fd, pointer data, size_t count) { \
        REAL(name); \
        if (strikes_fd(fd, call)) { \
            if (is_error()) REFUSE(-1); \
            if (falls_short(count)) count = (count + 1) / 2; \
        } \
        return real(fd, data, count); \
    }
TRANSFERS(read, READ, void *)
TRANSFERS(write, WRITE, const void *)
#define TRANSFERS_AT(name, call, pointer, offset_type) \
    ssize_t name(int fd, pointer data, size_t count, offset_type offset) { \
        REAL(name); \
        if (strikes_fd(fd, call)) { \
            if (is_error()) REFUSE(-1); \
            if (falls_short(count)) count = (count + 1) / 2; \
        } \
        return real(fd, data, count, offset); \
    }
TRANSFERS_AT(pread, READ, void *, off_t)
TRANSFERS_AT(pread64, READ, void *, off64_t)
TRANSFERS_AT(pwrite, WRITE, const void *, off_t)
TRANSFERS_AT(pwrite64, WRITE, const void *, off64_t)
#define VECTORS(name, call, one, parameters, arguments, one_arguments) \
    ssize_t name parameters { \
        REAL(name); \
        if (strikes_fd(fd, call)) { \
            if (is_error()) REFUSE(-1); \
            if (count > 1) count = (count + 1) / 2; \
            else if (falls_short(parts->iov_len)) return one one_arguments; \
        } \
        return real arguments; \
    }
VECTORS(writev, WRITE, write, (int fd, const struct iovec *parts, int count), (fd, parts, count),
        (fd, parts->iov_base, (parts->iov_len + 1) / 2))
VECTORS(readv, READ, read, (int fd, const struct iovec *parts, int count), (fd, parts, count),
        (fd, parts->iov_base, (parts->iov_len + 1) / 2))
VECTORS(pwritev, WRITE, pwrite, (int fd, const struct iovec *parts, int count, off_t offset),
        (fd, parts, count, offset), (fd, parts->iov_base, (parts->iov_len + 1) / 2, offset))

/* The C library's own streams try again after a short transfer, so only errors reach their callers. */
size_t fread(void *data, size_t size, size_t count, FILE *file) {
    REAL(fread);
    if (strikes_fd(fileno(file), READ) && table->kind != SHORT) REFUSE(0);
    return real(data, size, count, file);
}
size_t fwrite(const void *data, size_t size, size_t count, FILE *file) {
    REAL(fwrite);
    if (strikes_fd(fileno(file), WRITE) && table->kind != SHORT) REFUSE(0);
    return real(data, size, count, file);
}

#define ON_FD(name, call, parameters, arguments) \
    int name parameters { \
        REAL(name); \
        if (strikes_fd(fd, call) && is_error()) REFUSE(-1); \
        return real arguments; \
    }
ON_FD(fsync, SYNC, (int fd), (fd))
ON_FD(fdatasync, SYNC, (int fd), (fd))
ON_FD(ftruncate, TRUNCATE, (int fd, off_t length), (fd, length))
ON_FD(ftruncate64, TRUNCATE, (int fd, off64_t length), (fd, length))
int posix_fallocate(int fd, off_t offset, off_t length) { /* returns its error */
    REAL(posix_fallocate);
    if (strikes_fd(fd, ALLOCATE) && is_error()) return *errno_of_kind();
    return real(fd, offset, length);
}
int posix_fallocate64(int fd, off64_t offset, off64_t length) {
    REAL(posix_fallocate64);
    if (strikes_fd(fd, ALLOCATE) && is_error()) return *errno_of_kind();
    return real(fd, offset, length);
}
int close(int fd) { /* Linux has closed the file whatever close() says */
    REAL(close);
    int refused = strikes_fd(fd, CLOSE) && is_error();
    int result = real(fd);
    if (refused) REFUSE(-1);
    return result;
}

#define ON_PATH(name, call, parameters, path, arguments) \
    int name parameters { \
        REAL(name); \
        if (strikes_path(AT_FDCWD, path, call) && is_error()) REFUSE(-1); \
        return real arguments; \
    }
ON_PATH(unlink, UNLINK, (const char *path), path, (path))
ON_PATH(rmdir, UNLINK, (const char *path), path, (path))
ON_PATH(mkdir, MKDIR, (const char *path, mode_t mode), path, (path, mode))
ON_PATH(truncate, TRUNCATE, (const char *path, off_t length), path, (path, length))
ON_PATH(truncate64, TRUNCATE, (const char *path, off64_t length), path, (path, length))
int unlinkat(int folder, const char *path, int flags) {
    REAL(unlinkat);
    if (strikes_path(folder, path, UNLINK) && is_error()) REFUSE(-1);
    return real(folder, path, flags);
}
int mkdirat(int folder, const char *path, mode_t mode) {
    REAL(mkdirat);
    if (strikes_path(folder, path, MKDIR) && is_error()) REFUSE(-1);
    return real(folder, path, mode);
}
static void note_rename(const char *to) {
    size_t length = strlen(to);
    if (table && !table->begun && length > 8 && !strcmp(to + length - 8, "/last.pt"))
        __atomic_add_fetch(&table->checkpoints_before, 1, __ATOMIC_SEQ_CST);
}
int rename(const char *from, const char *to) {
    REAL(rename);
    if (strikes_path(AT_FDCWD, to, RENAME) && is_error()) REFUSE(-1);
    int result = real(from, to);
    if (!result) note_rename(to);
    return result;
}
int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    REAL(renameat);
    if (strikes_path(to_folder, to, RENAME) && is_error()) REFUSE(-1);
    int result = real(from_folder, from, to_folder, to);
    if (!result) note_rename(to);
    return result;
}

#define MAPS(name, offset_type) \
    void *name(void *start, size_t length, int protection, int flags, int fd, offset_type offset) { \
        if (fd >= 0 && strikes_fd(fd, MMAP) && is_error()) REFUSE(MAP_FAILED); \
        return (void *)syscall(SYS_mmap, start, length, protection, flags, fd, offset); \
    }
MAPS(mmap, off_t)
MAPS(mmap64, off64_t)
ssize_t copy_file_range(int from, off64_t *from_offset, int to, off64_t *to_offset, size_t count, unsigned flags) {
    REAL(copy_file_range);
    if (strikes_fd(to, COPY)) {
        if (is_error()) REFUSE(-1);
        if (falls_short(count)) count = (count + 1) / 2;
    }
    return real(from, from_offset, to, to_offset, count, flags);
}
#define SENDS(name, offset_type) \
    ssize_t name(int to, int from, offset_type *offset, size_t count) { \
        REAL(name); \
        if (strikes_fd(to, COPY)) { \
            if (is_error()) REFUSE(-1); \
            if (falls_short(count)) count = (count + 1) / 2; \
        } \
        return real(to, from, offset, count); \
    }
SENDS(sendfile, off_t)
SENDS(sendfile64, off64_t)
