/* A disk that fails: loaded with LD_PRELOAD, it fails, tears or survives not the n-th operation on
 * files below one folder.
 *
 * CAMPAIGN_DISK = "RANK OPERATION NUMBER EFFECT STAYS REPORT FOLDER"
 *
 * RANK       the rank that is hit, as launchers count; -1 for every rank
 * OPERATION  open read write fsync rename unlink mkdir link truncate; any: all but read
 * NUMBER     from 1, counted by this process
 * EFFECT     errno: the operation fails with that error (a number)
 *            short: a write takes half of the bytes;  torn: it does, and SIGKILL follows
 *            kill: SIGKILL before the operation;      after: SIGKILL after it
 * STAYS      1: all operations after it fail too (after a short write for want of space)
 * REPORT     a file that gets the line "OPERATION PATH" when the fault happens; where NUMBER is 0,
 *            nothing fails and it gets the number of operations of each kind at the end
 *
 * An open counts as "open" if it may write, else as "read", which read(2) and
 * preadv2(2), os.preadv in Python, are too. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN, READ, WRITE, FSYNC, RENAME, UNLINK, MKDIR, LINK, TRUNCATE, KINDS };
static const char *NAMES[KINDS] = {"open",   "read",  "write", "fsync",   "rename",
                                   "unlink", "mkdir", "link",  "truncate"};

static struct {
    int armed, rank, any, stays, error, half, die_before, die_after;
    long number;
    char operation[16], effect[16], report[PATH_MAX], folder[PATH_MAX];
} plan;
static atomic_long total, seen[KINDS];

/* The fate of an operation. */
typedef struct {
    int fails, half, dies_after;
} Fate;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int rank_of_process(void) {
    const char *variables[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"};
    for (int i = 0; i < 3; i++)
        if (getenv(variables[i])) return atoi(getenv(variables[i]));
    return -2; /* a launcher */
}

__attribute__((constructor)) static void prepare(void) {
    const char *text = getenv("CAMPAIGN_DISK");
    int rank = rank_of_process(), filled = 0;
    if (text)
        filled = sscanf(text, "%d %15s %ld %15s %d %4095s %4095s", &plan.rank, plan.operation,
                        &plan.number, plan.effect, &plan.stays, plan.report, plan.folder);
    if (filled != 7 || rank == -2 || (plan.rank != -1 && plan.rank != rank)) return;
    plan.any = !strcmp(plan.operation, "any");
    plan.half = !strcmp(plan.effect, "short") || !strcmp(plan.effect, "torn");
    plan.die_before = !strcmp(plan.effect, "kill");
    plan.die_after = !strcmp(plan.effect, "after") || !strcmp(plan.effect, "torn");
    plan.error = atoi(plan.effect) ? atoi(plan.effect) : ENOSPC;
    plan.armed = 1;
}

/* Append a line to the report, by calls that are not counted. */
static void report(const char *word, const char *rest) {
    char line[PATH_MAX + 64];
    int length = snprintf(line, sizeof line, "%s %s\n", word, rest);
    int file = REAL(open)(plan.report, O_WRONLY | O_CREAT | O_APPEND, 0666);
    if (file < 0) return;
    if (REAL(write)(file, line, length) < 0) plan.armed = 0;
    close(file);
}

__attribute__((destructor)) static void count(void) {
    char number[32];
    if (!plan.armed || plan.number != 0) return;
    for (int kind = 0; kind < KINDS; kind++) {
        snprintf(number, sizeof number, "%ld", atomic_load(&seen[kind]));
        report(NAMES[kind], number);
    }
}

static int below(const char *path) {
    size_t length = strlen(plan.folder);
    return !strncmp(path, plan.folder, length) && (path[length] == '/' || !path[length]);
}

static Fate judge(int kind, const char *path) {
    Fate fate = {0, 0, 0};
    if (!plan.armed || !below(path)) return fate;
    atomic_fetch_add(&seen[kind], 1);
    if (plan.any ? kind == READ : strcmp(plan.operation, NAMES[kind])) return fate;
    long now = atomic_fetch_add(&total, 1) + 1;
    if (plan.number == 0 || now < plan.number || (now > plan.number && !plan.stays)) return fate;
    if (now == plan.number) {
        report(NAMES[kind], path);
        if (plan.die_before) kill(getpid(), SIGKILL);
        fate.half = plan.half && kind == WRITE;
        fate.dies_after = plan.die_after;
        if (plan.half || plan.die_after) return fate;
    }
    errno = plan.error;
    fate.fails = 1;
    return fate;
}

static Fate judge_at(int kind, int folder, const char *path) {
    char full[2 * PATH_MAX], link[64];
    ssize_t length = 0;
    if (!plan.armed) return (Fate){0, 0, 0};
    if (path[0] == '/') return judge(kind, path);
    if (folder == AT_FDCWD) {
        if (getcwd(full, PATH_MAX)) length = strlen(full);
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        length = readlink(link, full, PATH_MAX);
    }
    snprintf(full + (length > 0 ? length : 0), PATH_MAX, "/%s", path);
    return judge(kind, full);
}

static Fate judge_file(int kind, int file) {
    char path[PATH_MAX], link[64];
    if (!plan.armed) return (Fate){0, 0, 0};
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length > 0 ? length : 0] = 0;
    return judge(kind, path);
}

/* Do `call` as its `fate` says, and return what it returned. */
#define DO(fate, call)                            \
    do {                                          \
        Fate fate_ = (fate);                      \
        if (fate_.fails) return -1;               \
        __typeof__(call) result_ = (call);        \
        if (fate_.dies_after) kill(getpid(), SIGKILL); \
        return result_;                           \
    } while (0)

#define WRITES(flags) (((flags) & O_ACCMODE) != O_RDONLY || ((flags) & O_CREAT))
#define MODE(flags)                                  \
    mode_t mode = 0;                                 \
    if ((flags) & (O_CREAT | (O_TMPFILE & ~O_DIRECTORY))) { \
        va_list rest;                                \
        va_start(rest, flags);                       \
        mode = va_arg(rest, mode_t);                 \
        va_end(rest);                                \
    }
#define OPENS(name)                                                                         \
    int name(const char *path, int flags, ...) {                                            \
        MODE(flags)                                                                         \
        DO(judge_at(WRITES(flags) ? OPEN : READ, AT_FDCWD, path), REAL(name)(path, flags, mode)); \
    }
#define OPENS_AT(name)                                                                    \
    int name(int folder, const char *path, int flags, ...) {                              \
        MODE(flags)                                                                       \
        DO(judge_at(WRITES(flags) ? OPEN : READ, folder, path),                           \
           REAL(name)(folder, path, flags, mode));                                        \
    }
OPENS(open)
OPENS(open64)
OPENS_AT(openat)
OPENS_AT(openat64)

ssize_t read(int file, void *bytes, size_t n) {
    DO(judge_file(READ, file), REAL(read)(file, bytes, n));
}

ssize_t preadv64v2(int file, const struct iovec *parts, int n, off64_t at, int flags) {
    DO(judge_file(READ, file), REAL(preadv64v2)(file, parts, n, at, flags));
}

ssize_t write(int file, const void *bytes, size_t n) {
    Fate fate = judge_file(WRITE, file);
    DO(fate, REAL(write)(file, bytes, fate.half ? n / 2 : n));
}

ssize_t pwrite64(int file, const void *bytes, size_t n, off64_t at) {
    Fate fate = judge_file(WRITE, file);
    DO(fate, REAL(pwrite64)(file, bytes, fate.half ? n / 2 : n, at));
}

ssize_t writev(int file, const struct iovec *parts, int n) {
    DO(judge_file(WRITE, file), REAL(writev)(file, parts, n));
}

int fsync(int file) { DO(judge_file(FSYNC, file), REAL(fsync)(file)); }
int fdatasync(int file) { DO(judge_file(FSYNC, file), REAL(fdatasync)(file)); }
int ftruncate(int file, off_t n) { DO(judge_file(TRUNCATE, file), REAL(ftruncate)(file, n)); }
int ftruncate64(int file, off64_t n) { DO(judge_file(TRUNCATE, file), REAL(ftruncate64)(file, n)); }

int rename(const char *from, const char *to) {
    DO(judge_at(RENAME, AT_FDCWD, to), REAL(rename)(from, to));
}

int renameat(int there, const char *from, int here, const char *to) {
    DO(judge_at(RENAME, here, to), REAL(renameat)(there, from, here, to));
}

int link(const char *from, const char *to) {
    DO(judge_at(LINK, AT_FDCWD, to), REAL(link)(from, to));
}

int linkat(int there, const char *from, int here, const char *to, int flags) {
    DO(judge_at(LINK, here, to), REAL(linkat)(there, from, here, to, flags));
}

int unlink(const char *path) { DO(judge_at(UNLINK, AT_FDCWD, path), REAL(unlink)(path)); }
int rmdir(const char *path) { DO(judge_at(UNLINK, AT_FDCWD, path), REAL(rmdir)(path)); }
int unlinkat(int folder, const char *path, int flags) {
    DO(judge_at(UNLINK, folder, path), REAL(unlinkat)(folder, path, flags));
}

int mkdir(const char *path, mode_t mode) {
    DO(judge_at(MKDIR, AT_FDCWD, path), REAL(mkdir)(path, mode));
}

int mkdirat(int folder, const char *path, mode_t mode) {
    DO(judge_at(MKDIR, folder, path), REAL(mkdirat)(folder, path, mode));
}
