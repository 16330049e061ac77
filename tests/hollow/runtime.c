/* A stand-in for CUDA's runtime, linked into CuPy's own module of that name: memory is real, behind
   pointers that lead nowhere for anybody but the copies below; handles open in other processes, not
   in the own one; streams and events are always done. What is not needed refuses.

   Numbers of attributes and errors are those of the headers. HOLLOW_DEVICES, HOLLOW_BYTES: how many
   devices, how much memory each process finds. */
#define _GNU_SOURCE
#include <cuda_runtime.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef unsigned long long u64;
typedef cudaError_t E;
enum { MOST = 1 << 16 };
static const u64 AWAY = 1ULL << 45; /* from a pointer to where its bytes really are */
static struct region { u64 start; size_t bytes; int file, device, mapped; } regions[MOST];
static struct pinned { u64 start; size_t bytes; } pinned[MOST];
static int made, pins;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int current;
static long handles = 0x1000; /* of streams and events */

static u64 number(const char *name, u64 otherwise) {
    const char *said = getenv(name);
    return said ? strtoull(said, 0, 10) : otherwise;
}
static int devices(void) { return number("HOLLOW_DEVICES", 1); }
static size_t whole(void) { return number("HOLLOW_BYTES", 1ULL << 34); }

static struct region *at(u64 p) {
    for (int i = made - 1; i >= 0; i--)
        if (regions[i].bytes && p >= regions[i].start && p < regions[i].start + regions[i].bytes)
            return regions + i;
    return 0;
}
static void *real(u64 p) { return (void *)(at(p) ? p + AWAY : p); }
static size_t used(void) {
    size_t sum = 0;
    for (int i = 0; i < made; i++) sum += regions[i].mapped ? 0 : regions[i].bytes;
    return sum;
}
static E hold(void **p, size_t bytes, int file, int device, int mapped) {
    void *memory = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    int i = 0;
    if (memory == MAP_FAILED) return cudaErrorMemoryAllocation;
    pthread_mutex_lock(&lock);
    while (i < made && regions[i].bytes) i++;
    if (i == MOST) abort();
    regions[i] = (struct region){(u64)memory - AWAY, bytes, file, device, mapped};
    if (i == made) made++;
    pthread_mutex_unlock(&lock);
    *p = (void *)regions[i].start;
    return cudaSuccess;
}
static E let_go(void *p, int mapped) {
    struct region *region = at((u64)p);
    if (!region || region->start != (u64)p || region->mapped != mapped) return cudaErrorInvalidValue;
    munmap(real((u64)p), region->bytes);
    close(region->file);
    region->bytes = 0;
    return cudaSuccess;
}

/* what there is */
E cudaGetLastError(void) { return 0; }
const char *cudaGetErrorName(E e) {
    return e == 2 ? "cudaErrorMemoryAllocation" : e == 101 ? "cudaErrorInvalidDevice" : "cudaError";
}
const char *cudaGetErrorString(E e) { return e == 2 ? "out of memory" : "the hollow GPU refuses"; }
E cudaDriverGetVersion(int *v) { return *v = 13000, 0; }
E cudaRuntimeGetVersion(int *v) { return *v = 13000, 0; }
E cudaGetDeviceCount(int *n) { return *n = devices(), 0; }
E cudaGetDevice(int *d) { return *d = current, 0; }
E cudaSetDevice(int d) {
    if (d < 0 || d >= devices()) return cudaErrorInvalidDevice;
    return current = d, 0;
}
E cudaDeviceSynchronize(void) { return 0; }
E cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
    switch ((int)a) { /* those of an H200 */
    case 1: return *v = 1024, 0;    /* threads per block */
    case 8: return *v = 49152, 0;   /* shared memory per block */
    case 10: return *v = 32, 0;     /* threads of a warp */
    case 16: return *v = 132, 0;    /* multiprocessors */
    case 39: return *v = 2048, 0;   /* threads per multiprocessor */
    case 41: return *v = 1, 0;      /* unified addresses */
    case 75: return *v = 9, 0;      /* compute capability 9.0 */
    case 81: return *v = 233472, 0; /* shared memory per multiprocessor */
    case 97: return *v = 232448, 0; /* shared memory per block, where asked for */
    default: return *v = 0, 0;
    }
}
E cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "hollow");
    p->multiProcessorCount = 132, p->major = 9, p->warpSize = 32, p->maxThreadsPerBlock = 1024;
    return p->totalGlobalMem = whole(), 0;
}
E cudaDeviceGetPCIBusId(char *s, int n, int d) {
    return d < devices() ? snprintf(s, n, "0000:%02X:00.0", 16 + d), 0 : cudaErrorInvalidDevice;
}
E cudaDeviceCanAccessPeer(int *can, int a, int b) { return *can = a != b, 0; }
E cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return 0; }

/* memory */
E cudaMemGetInfo(size_t *available, size_t *all) {
    return *all = whole(), *available = *all - used(), 0;
}
E cudaMalloc(void **p, size_t bytes) {
    int file = memfd_create("hollow", 0);
    if (used() + bytes > whole() || ftruncate(file, bytes + !bytes))
        return close(file), cudaErrorMemoryAllocation;
    return hold(p, bytes + !bytes, file, current, 0);
}
E cudaFree(void *p) { return p ? let_go(p, 0) : 0; }
E cudaHostAlloc(void **p, size_t bytes, unsigned flags) {
    int i = 0;
    *p = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    pthread_mutex_lock(&lock);
    while (i < pins && pinned[i].bytes) i++;
    pinned[i] = (struct pinned){(u64)*p, bytes};
    if (i == pins) pins++;
    pthread_mutex_unlock(&lock);
    return 0;
}
E cudaFreeHost(void *p) {
    for (int i = 0; i < pins; i++)
        if (pinned[i].start == (u64)p) munmap(p, pinned[i].bytes), pinned[i].bytes = 0;
    return 0;
}
E cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    struct region *region = at((u64)p);
    memset(a, 0, sizeof *a);
    if (region) return a->type = 2, a->device = region->device, a->devicePointer = (void *)p, 0;
    for (int i = 0; i < pins; i++)
        if ((u64)p - pinned[i].start < pinned[i].bytes) return a->type = 1, 0;
    return a->device = -2, 0;
}
E cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind kind) {
    struct region *s = at((u64)from), *d = at((u64)to);
    int told = kind == 4 || kind == (s ? (d ? 3 : 2) : (d ? 1 : 0));
    int inside = (!s || (u64)from + n <= s->start + s->bytes) &&
                 (!d || (u64)to + n <= d->start + d->bytes);
    if (n && !(told && inside)) {
        fprintf(stderr, "hollow: a copy of kind %d, %s, does not fit\n", kind, d ? "up" : "down");
        return cudaErrorInvalidValue;
    }
    memmove(real((u64)to), real((u64)from), n);
    return 0;
}
E cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind k, cudaStream_t s) {
    return cudaMemcpy(to, from, n, k);
}
E cudaMemset(void *p, int value, size_t n) {
    if (n && !at((u64)p)) return cudaErrorInvalidValue;
    return n ? memset(real((u64)p), value, n) : 0, 0;
}
E cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t s) { return cudaMemset(p, v, n); }

/* memory of neighbours */
struct told { int process, file, device; size_t bytes; };
E cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *p) {
    struct region *region = at((u64)p);
    if (!region || region->mapped) return cudaErrorInvalidValue;
    struct told told = {getpid(), region->file, region->device, region->bytes};
    memset(handle, 0, sizeof *handle);
    return memcpy(handle, &told, sizeof told), 0;
}
E cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t handle, unsigned flags) {
    struct told told;
    char path[64];
    memcpy(&told, &handle, sizeof told);
    if (told.process == getpid()) return cudaErrorDeviceUninitialized;
    sprintf(path, "/proc/%d/fd/%d", told.process, told.file);
    int file = open(path, O_RDWR);
    if (file < 0 || flags != 1) return cudaErrorInvalidResourceHandle;
    return hold(p, told.bytes, file, told.device, 1);
}
E cudaIpcCloseMemHandle(void *p) { return let_go(p, 1); }

/* streams and events: always done */
static E one_more(void *handle) {
    return *(void **)handle = (void *)__sync_add_and_fetch(&handles, 16), 0;
}
E cudaStreamCreate(cudaStream_t *s) { return one_more(s); }
E cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { return one_more(s); }
E cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int p) { return one_more(s); }
E cudaStreamGetFlags(cudaStream_t s, unsigned *flags) { return *flags = 1, 0; }
E cudaStreamDestroy(cudaStream_t s) { return 0; }
E cudaStreamSynchronize(cudaStream_t s) { return 0; }
E cudaStreamQuery(cudaStream_t s) { return 0; }
E cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) { return e ? 0 : 400; }
E cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) { return *c = 0, 0; }
E cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *x) { return f(x), 0; }
E cudaEventCreate(cudaEvent_t *e) { return one_more(e); }
E cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { return one_more(e); }
E cudaEventDestroy(cudaEvent_t e) { return 0; }
E cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { return *ms = 1, 0; }
E cudaEventQuery(cudaEvent_t e) { return 0; }
E cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return 0; }
E cudaEventSynchronize(cudaEvent_t e) { return 0; }
E cudaProfilerStart(void) { return 0; }
E cudaProfilerStop(void) { return 0; }
E cudaDeviceSetLimit(enum cudaLimit l, size_t v) { return 0; }
E cudaDeviceGetLimit(size_t *v, enum cudaLimit l) { return *v = 0, 0; }
E cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t n, cudaStream_t s) {
    return cudaMemcpy(to, from, n, 3);
}
E cudaMemcpyPeer(void *to, int a, const void *from, int b, size_t n) {
    return cudaMemcpy(to, from, n, 3);
}
E cudaDeviceGetByPCIBusId(int *d, const char *s) { return *d = 0, 0; }
E cudaDeviceDisablePeerAccess(int peer) { return 0; }
E cudaStreamGetPriority(cudaStream_t s, int *p) { return *p = 0, 0; }
E cudaHostRegister(void *p, size_t n, unsigned flags) { return 0; }
E cudaHostUnregister(void *p) { return 0; }
E cudaIpcGetEventHandle(cudaIpcEventHandle_t *h, cudaEvent_t e) { return 801; }
E cudaIpcOpenEventHandle(cudaEvent_t *e, cudaIpcEventHandle_t h) { return 801; }
E cudaMallocManaged(void **p, size_t n, unsigned flags) { return 801; }
E cudaMallocAsync(void **p, size_t n, cudaStream_t s) { return 801; }
E cudaMallocFromPoolAsync(void **p, size_t n, cudaMemPool_t q, cudaStream_t s) { return 801; }
E cudaFreeAsync(void *p, cudaStream_t s) { return 801; }
E cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t c, void *x, unsigned f) { return 801; }
