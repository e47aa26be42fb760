/* Counts the calls that name a file below one of the folders in SLOW_FOLDERS (colons between them), and delays each by
   SLOW_US microseconds, as a shared file system does: for LD_PRELOAD. SLOW_COUNT is a file of eight bytes, the number.
   Paths relative to the working folder, files that are open already, and those of the dynamic loader are not seen. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

static unsigned long *count;
static char folders[8][4096];
static struct timespec delay;

__attribute__((constructor)) static void begin(void) {
    const char *list = getenv("SLOW_FOLDERS"), *file = getenv("SLOW_COUNT"), *us = getenv("SLOW_US");
    for (int i = 0; list && *list && i < 8; i++) {
        size_t length = strcspn(list, ":");
        if (length < sizeof folders[i]) memcpy(folders[i], list, length);
        list += length + (list[length] == ':');
    }
    delay.tv_nsec = us ? atol(us) * 1000 : 0;
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    int opened = file ? real(file, O_RDWR) : -1;
    void *place = opened < 0 ? MAP_FAILED : mmap(NULL, 8, PROT_READ | PROT_WRITE, MAP_SHARED, opened, 0);
    if (place != MAP_FAILED) count = place;
}

static void charge(const char *path) {
    for (int i = 0; path && i < 8 && folders[i][0]; i++) {
        size_t length = strlen(folders[i]);
        if (!strncmp(path, folders[i], length) && (path[length] == '/' || !path[length])) {
            if (count) __atomic_add_fetch(count, 1, __ATOMIC_RELAXED);
            if (delay.tv_nsec) nanosleep(&delay, NULL);
            return;
        }
    }
}

#define WRAP(type, name, path, parameters, arguments)          \
    type name parameters {                                     \
        static type(*real) parameters;                         \
        if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name);  \
        charge(path);                                          \
        return real arguments;                                 \
    }
#define WRAP_OPEN(name, parameters, arguments)                             \
    int name(parameters, int flags, ...) {                                 \
        static int (*real)(parameters, int, ...);                          \
        va_list rest;                                                      \
        va_start(rest, flags);                                             \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                                      \
        if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name);              \
        charge(path);                                                      \
        return real(arguments, flags, mode);                               \
    }
#define COMMA ,
typedef struct stat S;
typedef struct stat64 S64;
WRAP_OPEN(open, const char *path, path)
WRAP_OPEN(open64, const char *path, path)
WRAP_OPEN(openat, int folder COMMA const char *path, folder COMMA path)
WRAP_OPEN(openat64, int folder COMMA const char *path, folder COMMA path)
WRAP(FILE *, fopen, p, (const char *p, const char *m), (p, m))
WRAP(FILE *, fopen64, p, (const char *p, const char *m), (p, m))
WRAP(int, stat, p, (const char *p, S *s), (p, s))
WRAP(int, stat64, p, (const char *p, S64 *s), (p, s))
WRAP(int, lstat, p, (const char *p, S *s), (p, s))
WRAP(int, lstat64, p, (const char *p, S64 *s), (p, s))
WRAP(int, fstatat, p, (int d, const char *p, S *s, int f), (d, p, s, f))
WRAP(int, fstatat64, p, (int d, const char *p, S64 *s, int f), (d, p, s, f))
WRAP(int, __xstat, p, (int v, const char *p, S *s), (v, p, s))
WRAP(int, __xstat64, p, (int v, const char *p, S64 *s), (v, p, s))
WRAP(int, __lxstat, p, (int v, const char *p, S *s), (v, p, s))
WRAP(int, __lxstat64, p, (int v, const char *p, S64 *s), (v, p, s))
WRAP(int, statx, p, (int d, const char *p, int f, unsigned m, struct statx *s), (d, p, f, m, s))
WRAP(int, access, p, (const char *p, int m), (p, m))
WRAP(int, faccessat, p, (int d, const char *p, int m, int f), (d, p, m, f))
WRAP(ssize_t, readlink, p, (const char *p, char *b, size_t n), (p, b, n))
WRAP(ssize_t, readlinkat, p, (int d, const char *p, char *b, size_t n), (d, p, b, n))
WRAP(DIR *, opendir, p, (const char *p), (p))
WRAP(int, execve, p, (const char *p, char *const a[], char *const e[]), (p, a, e))
