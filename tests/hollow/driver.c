/* A stand-in for libcuda.so.1: it loads what CuPy has compiled, launches it where the sizes are
   allowed, and computes nothing. HOLLOW_TRACE: say each launch. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cuInit(unsigned flags) { return 100; } /* only NVRTC asks, and then leaves the driver alone */
int cuGetExportTable(void **table, void *id) { return 500; }
int cuDriverGetVersion(int *v) { return *v = 13000, 0; }
int cuGetErrorName(int e, const char **s) { return *s = "CUDA_ERROR", 0; }
int cuGetErrorString(int e, const char **s) { return *s = "the hollow GPU refuses", 0; }
int cuDeviceGet(int *d, int ordinal) { return *d = ordinal, 0; }
int cuDeviceGetUuid_v2(unsigned char *id, int d) { return memset(id, d + 1, 16), 0; }
int cuCtxGetCurrent(void **c) { return *c = (void *)8, 0; }
int cuCtxSetCurrent(void *c) { return 0; }
int cuCtxGetDevice(int *d) { return *d = 0, 0; }
int cuStreamGetCtx(void *s, void **c) { return *c = (void *)8, 0; }
int cuModuleLoad(void **m, char *file) { return *m = (void *)16, 0; }
int cuModuleLoadData(void **m, void *image) { return *m = (void *)16, 0; }
int cuModuleUnload(void *m) { return 0; }
int cuModuleGetFunction(void **f, void *m, char *name) { return *f = strdup(name), 0; }
int cuFuncGetAttribute(int *v, int which, void *f) { return *v = 32, 0; }
int cuFuncSetAttribute(void *f, int which, int v) { return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int b, size_t s) {
    return *n = 8, 0;
}
int cuOccupancyMaxPotentialBlockSize(int *g, int *b, void *f, void *s, size_t n, int most) {
    return *g = 132, *b = 256, 0;
}
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void *stream, void **args, void **extra) {
    int allowed = gx && gy && gz && bx && by && bz && gx < 1u << 31 && gy < 1u << 16 &&
                  gz < 1u << 16 && bx * by * bz <= 1024 && shared <= 232448;
    if (!allowed || getenv("HOLLOW_TRACE"))
        fprintf(stderr, "hollow: %s <<<(%u,%u,%u), (%u,%u,%u), %u, %p>>>\n", (char *)f, gx, gy, gz,
                bx, by, bz, shared, stream);
    return !allowed;
}
