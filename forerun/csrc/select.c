/* Selects the variant: the best that the CPU and its system support. */
#include "layouts.h"
#include "between.h"
#include "forward.h"
#include <string.h>

extern const fr_operations fr_operations_plain;
#if defined(__x86_64__)
#include <cpuid.h>
extern const fr_operations fr_operations_avx2, fr_operations_avxvnni, fr_operations_avx512vnni;
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(__aarch64__)
extern const fr_operations fr_operations_neon;
#endif

static const fr_operations *const operations[FR_ISAS] = {
    &fr_operations_plain,
#if defined(__x86_64__)
    &fr_operations_avx2, &fr_operations_avxvnni, &fr_operations_avx512vnni,
#elif defined(__aarch64__)
    NULL, NULL, NULL, &fr_operations_neon,
#endif
};
static int chosen = FR_PLAIN;
int fr_fetches_near = 0;

static int is_intel(void) {
#if defined(__x86_64__)
    unsigned a, b, c, d;
    return __get_cpuid(0, &a, &b, &c, &d) && b == signature_INTEL_ebx;
#else
    return 0;
#endif
}

static int runs(int isa) {
    if (isa == FR_PLAIN) return 1;
#if defined(__x86_64__)
    unsigned a, b, c, d, b7, c7, d7, a71 = 0, top, state = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    if (c & bit_OSXSAVE) __asm__("xgetbv" : "=a"(state), "=d"(d) : "c"(0));
    if (!__get_cpuid_count(7, 0, &top, &b7, &c7, &d7)) return 0;
    if (top) __get_cpuid_count(7, 1, &a71, &b, &top, &d);
    int avx2 = (state & 6) == 6 && (c & bit_FMA) && (c & bit_F16C) && (b7 & bit_AVX2);
    unsigned wide = bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL;
    if (isa == FR_AVX2) return avx2;
    if (isa == FR_AVXVNNI) return avx2 && (a71 & 1 << 4);
    if (isa == FR_AVX512VNNI) return avx2 && (state & 0xe6) == 0xe6 && (b7 & wide) == wide && (c7 & bit_AVX512VNNI);
#elif defined(__aarch64__) && defined(__linux__)
    if (isa == FR_NEON) return (getauxval(AT_HWCAP) & 1 << 20) != 0; /* ASIMDDP */
#elif defined(__aarch64__)
    if (isa == FR_NEON) return 1; /* Apple's */
#endif
    return 0;
}

int fr_find(const char *name) {
    for (int isa = FR_ISAS - 1; isa >= 0; isa--) {
        int is_named = operations[isa] && (!*name || !strcmp(name, operations[isa]->name));
        if (is_named && runs(isa)) return isa;
    }
    return -1;
}

int fr_select(const char *name) {
    int found = fr_find(name);
    if (found < 0) return -1;
    fr_enter(); /* because a forward in another thread must not change its variant halfway */
    chosen = found;
    fr_fetches_near = is_intel();
    fr_leave();
    return found;
}

int fr_chosen(void) { return chosen; }
const char *fr_variant(void) { return operations[chosen]->name; }
int fr_abi(void) { return FORERUN_ABI; }

#ifndef FORERUN_BUILD
#define FORERUN_BUILD "unknown"
#endif
/* Behind a mark, by which forerun/csrc/build.py reads it from the file without loading it. */
static const char build[] = "forerun-build:" FORERUN_BUILD;
const char *fr_build(void) { return build + sizeof "forerun-build:" - 1; }

int fr_sizes(int32_t *sizes, int n) {
    const int32_t all[] = {sizeof(fr_matrix), sizeof(fr_record), sizeof(fr_layer),        sizeof(fr_model),
                           sizeof(fr_cache),  sizeof(fr_batch),  sizeof(fr_chain_request), sizeof(fr_growth)};
    int count = sizeof all / sizeof *all;
    for (int i = 0; i < n && i < count; i++) sizes[i] = all[i];
    return count;
}

size_t fr_record_bytes(int inputs, int rows) {
    if (inputs < 1 || rows < 1) return 0;
    return (size_t)inputs / 32 * (size_t)rows * sizeof(fr_record);
}

void fr_quantise(const float *x, int rows, int stride, int inputs, void *to, int first_superblock, int end_superblock) {
    operations[chosen]->quantise(x, rows, stride, inputs, to, first_superblock, end_superblock);
}

void fr_product(const fr_matrix *m, const float *x, int stride, const void *from, int rows, float *out, int out_stride, int first_panel,
                int end_panel) {
    operations[chosen]->product(m, x, stride, from, rows, out, out_stride, first_panel, end_panel);
}
