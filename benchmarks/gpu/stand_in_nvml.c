/* A stand-in for libnvidia-ml.so.1: what UCX's module is linked against; see stand_in_driver.c. */
const char *nvmlErrorString(int error) { return "of the stand-in"; }
