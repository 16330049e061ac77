/* A stand-in for libcuda.so.1 with one device, for what UCX asks of a driver and no more.

   Its device memory is host memory at pointers that lead nowhere: only the copies below know where
   it really lies. So whoever reads or writes a device pointer by itself crashes, as on a GPU, and
   bytes that arrive were moved by the driver. Other processes open memory by its handle.

   What is seen with it: which code an MPI takes. What is not: anything about speed, streams,
   peer access between GPUs or RDMA. Numbers of attributes are those of cuda.h. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef unsigned long long u64;
enum { OK = 0, INVALID = 1, NOT_FOUND = 500 };
static const u64 AWAY = 1ULL << 45; /* from a pointer to where its bytes really are */

struct region {
    u64 start;
    size_t bytes;
    char path[64];
};
static struct region regions[256];
static int made;
static u64 moved; /* bytes, by copies of MPI's */
static int context, object;

static struct region *at(u64 pointer) {
    for (int i = 0; i < made; i++)
        if (pointer >= regions[i].start && pointer < regions[i].start + regions[i].bytes)
            return regions + i;
    return 0;
}

static void *real(u64 pointer) { return (void *)(at(pointer) ? pointer + AWAY : pointer); }

static u64 mapped(const char *path, size_t bytes) {
    int file = open(path, O_RDWR | (bytes ? O_CREAT : 0), 0600);
    if (file < 0 || made == 256) return 0;
    if (bytes && ftruncate(file, bytes)) return 0;
    struct region *region = regions + made++;
    region->bytes = lseek(file, 0, SEEK_END);
    region->start = (u64)mmap(0, region->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) - AWAY;
    strcpy(region->path, path);
    close(file);
    return region->start;
}

static int moving(u64 to, u64 from, size_t bytes) {
    moved += bytes;
    memcpy(real(to), real(from), bytes);
    return OK;
}

/* for the program that tries MPI */
u64 stand_in_malloc(size_t bytes) {
    char path[64];
    sprintf(path, "/dev/shm/stand-in-%d-%d", getpid(), made);
    return mapped(path, bytes);
}
void stand_in_copy(u64 to, u64 from, size_t bytes) { memcpy(real(to), real(from), bytes); }
u64 stand_in_moved(void) { return moved; }
__attribute__((destructor)) static void end(void) {
    for (int i = 0; i < made; i++) unlink(regions[i].path);
}

/* the driver */
int cuInit(unsigned flags) { return OK; }
int cuDriverGetVersion(int *version) { return *version = 13000, OK; }
int cuDeviceGetCount(int *count) { return *count = 1, OK; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal ? INVALID : OK; }
int cuDeviceGetAttribute(int *value, int which, int device) {
    /* 33: PCI bus, 41: unified addressing, 75: major compute capability */
    return *value = which == 33 ? 0x13 : which == 41 ? 1 : which == 75 ? 9 : 0, OK;
}
int cuDeviceGetName(char *name, int bytes, int device) { return strncpy(name, "stand-in", bytes), OK; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { return *bytes = 1ULL << 34, OK; }
int cuDeviceGetUuid_v2(char *uuid, int device) { return memset(uuid, 7, 16), OK; }
int cuCtxGetCurrent(void **found) { return *found = &context, OK; }
int cuCtxGetDevice(int *device) { return *device = 0, OK; }
int cuCtxGetId(void *of, u64 *id) { return *id = 1, OK; }
int cuCtxPushCurrent_v2(void *of) { return OK; }
int cuCtxPopCurrent_v2(void **found) { return found ? (*found = &context, OK) : OK; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    return *flags = 0, *active = 1, OK;
}
int cuDevicePrimaryCtxRetain(void **found, int device) { return *found = &context, OK; }
int cuDevicePrimaryCtxRelease_v2(int device) { return OK; }

static void told(void *to, int which, u64 pointer) {
    struct region *region = at(pointer);
    switch (which) {
    case 1: *(void **)to = region ? &context : 0; break;
    case 2: *(unsigned *)to = region ? 2 : 0; break; /* CU_MEMORYTYPE_DEVICE */
    case 7: *(u64 *)to = region ? region - regions + 1 : 0; break; /* buffer id */
    case 8: *(unsigned *)to = 0; break; /* managed */
    case 9: *(int *)to = region ? 0 : -2; break; /* device */
    case 10: *(int *)to = 1; break; /* a handle can be had */
    case 11: *(u64 *)to = region ? region->start : 0; break;
    case 12: *(size_t *)to = region ? region->bytes : 0; break;
    default: memset(to, 0, 8);
    }
}
int cuPointerGetAttribute(void *to, int which, u64 pointer) {
    return at(pointer) ? (told(to, which, pointer), OK) : INVALID;
}
int cuPointerGetAttributes(unsigned count, int *which, void **to, u64 pointer) {
    for (unsigned i = 0; i < count; i++) told(to[i], which[i], pointer);
    return OK;
}
int cuPointerSetAttribute(const void *value, int which, u64 pointer) { return OK; }
int cuMemGetAddressRange_v2(u64 *start, size_t *bytes, u64 pointer) {
    struct region *region = at(pointer);
    if (!region) return INVALID;
    if (start) *start = region->start;
    if (bytes) *bytes = region->bytes;
    return OK;
}
int cuMemAlloc_v2(u64 *pointer, size_t bytes) { return *pointer = stand_in_malloc(bytes), OK; }
int cuMemFree_v2(u64 pointer) { return OK; }
int cuMemHostRegister_v2(void *start, size_t bytes, unsigned flags) { return OK; }
int cuMemHostUnregister(void *start) { return OK; }
int cuMemcpyAsync(u64 to, u64 from, size_t bytes, void *stream) { return moving(to, from, bytes); }
int cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t bytes, void *s) { return moving(to, from, bytes); }
int cuMemcpyHtoD_v2(u64 to, const void *from, size_t n) { return moving(to, (u64)from, n); }

/* Streams and events: all work is done when it is asked for. */
int cuStreamCreate(void **stream, unsigned flags) { return *stream = &object, OK; }
int cuStreamDestroy_v2(void *stream) { return OK; }
int cuStreamSynchronize(void *stream) { return OK; }
int cuStreamAddCallback(void *s, void (*call)(void *, int, void *), void *with, unsigned flags) {
    return call(s, OK, with), OK;
}
int cuEventCreate(void **event, unsigned flags) { return *event = &object, OK; }
int cuEventDestroy_v2(void *event) { return OK; }
int cuEventQuery(void *event) { return OK; }
int cuEventRecord(void *event, void *stream) { return OK; }

struct handle {
    char path[64];
};
int cuIpcGetMemHandle(struct handle *handle, u64 pointer) {
    struct region *region = at(pointer);
    return region ? (memcpy(handle, region->path, 64), OK) : INVALID;
}
int cuIpcOpenMemHandle_v2(u64 *pointer, struct handle handle, unsigned flags) {
    return (*pointer = mapped(handle.path, 0)) ? OK : INVALID;
}
int cuIpcCloseMemHandle(u64 pointer) { return OK; }

int cuGetErrorString(int error, const char **text) { return *text = "of the stand-in", OK; }
int cuGetProcAddress_v2(const char *name, void **function, int version, u64 flags, int *status) {
    char versioned[128];
    snprintf(versioned, sizeof versioned, "%s_v2", name);
    if (!(*function = dlsym(RTLD_DEFAULT, name))) *function = dlsym(RTLD_DEFAULT, versioned);
    if (status) *status = !*function;
    return *function ? OK : NOT_FOUND;
}

/* Named by UCX's module, for kinds of memory that there are none of here. */
#define NONE(name) int name(void) { return 801; }
NONE(cuMemAddressFree) NONE(cuMemAddressReserve) NONE(cuMemAllocManaged) NONE(cuMemCreate)
NONE(cuMemExportToShareableHandle) NONE(cuMemGetAllocationGranularity)
NONE(cuMemGetAllocationPropertiesFromHandle) NONE(cuMemImportFromShareableHandle) NONE(cuMemMap)
NONE(cuMemPoolDestroy) NONE(cuMemPoolExportPointer) NONE(cuMemPoolExportToShareableHandle)
NONE(cuMemPoolImportFromShareableHandle) NONE(cuMemPoolImportPointer) NONE(cuMemPoolSetAccess)
NONE(cuMemRangeGetAttribute) NONE(cuMemRelease) NONE(cuMemRetainAllocationHandle)
NONE(cuMemSetAccess) NONE(cuMemUnmap)
