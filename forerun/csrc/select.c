/* Selects the instruction set: the best that the CPU and its system support.

     index          tables of a variant, from its variant_*.c
     FR_PLAIN       fr_operations_plain, fr_vector_ops_plain, fr_attention_steps_plain
     FR_AVX2        fr_operations_avx2, ...
     ... */
#include "attention.h"
#include "forward.h"
#include "chains.h"
#include "layouts.h"
#include "system.h"
#include "threads.h"
#include "trees.h"
#include "vector_ops.h"

#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

/* The variants of this build. */
#if defined(__x86_64__)
#define VARIANTS(X)                                                                                \
    X(FR_PLAIN, plain)                                                                             \
    X(FR_AVX2, avx2)                                                                               \
    X(FR_AVXVNNI, avxvnni)                                                                         \
    X(FR_AVX512VNNI, avx512vnni)
#elif defined(__aarch64__)
#define VARIANTS(X)                                                                                \
    X(FR_PLAIN, plain)                                                                             \
    X(FR_NEON, neon)                                                                               \
    X(FR_I8MM, i8mm)
#else
#define VARIANTS(X) X(FR_PLAIN, plain)
#endif

#define X(isa, name)                                                                               \
    extern const fr_operations fr_operations_##name;                                               \
    extern const fr_vector_ops fr_vector_ops_##name;                                               \
    extern const fr_attention_steps fr_attention_steps_##name;
VARIANTS(X)
#undef X

typedef struct {
    const fr_operations *operations;
    const fr_vector_ops *ops;
    const fr_attention_steps *attention;
} variant_tables;

#define X(isa, name)                                                                               \
    [isa] = {&fr_operations_##name, &fr_vector_ops_##name, &fr_attention_steps_##name},
static const variant_tables variants[FR_ISAS] = {VARIANTS(X)};
#undef X

static int chosen = FR_PLAIN;
int fr_fetches_near = 0;

#if defined(__x86_64__)
static int is_intel(void) {
    unsigned a;
    unsigned b;
    unsigned c;
    unsigned d;
    return __get_cpuid(0, &a, &b, &c, &d) && b == signature_INTEL_ebx;
}

/* Bits of XCR0: the registers that the system saves. */
#define SAVES_AVX 0x06
#define SAVES_AVX512 0xe6
#define HAS_AVXVNNI (1 << 4) /* of eax, leaf 7.1 */

static int is_supported(int isa) {
    unsigned a;
    unsigned b;
    unsigned c;
    unsigned d;
    unsigned saved = 0;
    unsigned last_leaf;
    unsigned b7;
    unsigned c7;
    unsigned a71 = 0;
    if (isa == FR_PLAIN) return 1;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    unsigned c1 = c;
    if (c1 & bit_OSXSAVE) __asm__("xgetbv" : "=a"(saved), "=d"(d) : "c"(0));
    if (!__get_cpuid_count(7, 0, &last_leaf, &b7, &c7, &d)) return 0;
    if (last_leaf) __get_cpuid_count(7, 1, &a71, &b, &c, &d);
    if ((saved & SAVES_AVX) != SAVES_AVX) return 0;
    if (!(c1 & bit_FMA) || !(c1 & bit_F16C) || !(b7 & bit_AVX2)) return 0;
    if (isa == FR_AVX2) return 1;
    if (isa == FR_AVXVNNI) return (a71 & HAS_AVXVNNI) != 0;
    unsigned avx512 = bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL;
    return isa == FR_AVX512VNNI && (saved & SAVES_AVX512) == SAVES_AVX512 &&
           (b7 & avx512) == avx512 && (c7 & bit_AVX512VNNI);
}
#else
static int is_intel(void) { return 0; }

static int is_supported(int isa) {
    if (isa == FR_PLAIN) return 1;
    if (isa == FR_NEON) return fr_has_dotprod();
    if (isa == FR_I8MM) return fr_has_dotprod() && fr_has_i8mm();
    return 0;
}
#endif

int fr_find(const char *name) {
    for (int isa = FR_ISAS - 1; isa >= 0; isa--) {
        const fr_operations *operations = variants[isa].operations;
        if (!operations || (*name && strcmp(name, operations->name) != 0)) continue;
        if (is_supported(isa)) return isa;
    }
    return -1;
}

int fr_select(const char *name) {
    int isa = fr_find(name);
    if (isa < 0) return -1;
    fr_enter(); /* because a forward in another thread must not change its variant halfway */
    chosen = isa;
    fr_fetches_near = is_intel();
    fr_leave();
    return isa;
}

int fr_chosen(void) { return chosen; }

const char *fr_variant(void) { return variants[chosen].operations->name; }

const fr_vector_ops *fr_chosen_vector_ops(void) { return variants[chosen].ops; }

const fr_attention_steps *fr_chosen_attention(void) { return variants[chosen].attention; }

int fr_abi(void) { return FORERUN_ABI; }

#ifndef FORERUN_BUILD
#define FORERUN_BUILD "unknown"
#endif
/* The mark before it lets build.py read it from the file without loading the library. */
static const char build[] = "forerun-build:" FORERUN_BUILD;

const char *fr_build(void) { return build + sizeof "forerun-build:" - 1; }

int fr_sizes(int32_t *sizes, int n) {
    const int32_t all[] = {
        sizeof(fr_matrix), sizeof(fr_record), sizeof(fr_layer),         sizeof(fr_model),
        sizeof(fr_cache),  sizeof(fr_batch),  sizeof(fr_chain_request), sizeof(fr_growth),
    };
    int count = sizeof all / sizeof *all;
    for (int i = 0; i < n && i < count; i++)
        sizes[i] = all[i];
    return count;
}

size_t fr_record_bytes(int inputs, int rows) {
    if (inputs < 1 || rows < 1) return 0;
    return (size_t)inputs / 32 * (size_t)rows * sizeof(fr_record);
}

void fr_quantise(const float *x, int rows, int stride, int inputs, void *records,
                 int first_superblock, int end_superblock) {
    variants[chosen].operations->quantise(x, rows, stride, inputs, records, first_superblock,
                                          end_superblock);
}

void fr_product(const fr_matrix *m, const float *x, int stride, const void *records, int rows,
                float *out, int out_stride, int first_panel, int end_panel) {
    variants[chosen].operations->product(m, x, stride, records, rows, out, out_stride, first_panel,
                                         end_panel);
}
