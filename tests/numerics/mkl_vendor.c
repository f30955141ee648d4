/* MKL asks these two functions whether the CPU is one of Intel's, and chooses its kernels by the
 * answer. Loaded before torch (LD_PRELOAD), this library answers in their place:
 *
 *     cc -shared -fPIC -DINTEL=1 -o libvendor.so mkl_vendor.c
 */
int mkl_serv_intel_cpu(void) { return INTEL; }
int mkl_serv_intel_cpu_true(void) { return INTEL; }
