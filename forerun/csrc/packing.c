/* Packs the rows of files into panels, and reads exact values back. Plain C, the same on every CPU.

   Blocks in GGUF files, with their bytes:

     Q4_0  d 2 | codes 16              Q5_0  d 2 | high bits 4 | codes 16
     Q4_1  d 2 | m 2 | codes 16        Q5_1  d 2 | m 2 | high bits 4 | codes 16
     Q8_0  d 2 | codes 32              MXFP4  e 1 | codes 16
     IQ4_NL  d 2 | codes 16

   of 32 inputs, where the low half of code byte i belongs to input i and the high half to input
   16 + i; and of 256 inputs, which are 8 blocks of 32:

     Q4_K  d 2 | m 2 | scales 12 | codes 128
     Q5_K  d 2 | m 2 | scales 12 | high bits 32 | codes 128
     Q6_K  codes 128 | high bits 64 | scales 16 | d 2
     Q3_K  high bits 32 | codes 64 | scales 12 | d 2
     Q2_K  scales 16 | codes 64 | d 2 | m 2
     IQ4_XS  d 2 | high bits of scales 2 | low bits of scales 4 | codes 128
     wide rows  d 2 | scales 16 | codes 128

   In wide rows, which are ours (wide_rows.py), the halves of code byte i belong to the inputs 2 i
   and 2 i + 1.

   layouts.h shows the panels. */
#include "layouts.h"
#include "vectors.h"

#define X(format, code_bits, kind, own_scales, shared_scales, bytes, inputs, packed)               \
    {                                                                                              \
        .bits = (code_bits),                                                                       \
        .scales = (kind),                                                                          \
        .unit_bytes = ((code_bits) < 16 ? 64 : 2) * (code_bits) + (own_scales),                    \
        .group_bytes = (shared_scales),                                                            \
        .block_bytes = (bytes),                                                                    \
        .block_inputs = (inputs),                                                                  \
        .layout = (packed),                                                                        \
    },
const fr_layout fr_layouts[FR_FORMATS] = {FR_LAYOUTS(X)};
#undef X

#define IQ4_NUMBERS {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241}
const uint8_t fr_numbers[6][16] = {
    IQ4_NUMBERS,
    IQ4_NUMBERS,
    {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116},
    {136, 153, 171, 128, 121, 129, 137, 128, 120, 103, 85, 128, 119, 127, 135, 128},
    {136, 152, 168, 184, 200, 216, 232, 252, 120, 104, 88, 72, 56, 40, 24, 4},
    {136, 152, 168, 184, 200, 216, 232, 248, 120, 104, 88, 72, 56, 40, 24, 8},
};

/* 32 weights: their codes as panels hold them, scales and minimums of each 16 (K formats), and d
   and m as float16. */
typedef struct {
    uint8_t q[32], sc[2], mn[2];
    uint16_t d, m;
} block32;

static uint16_t half_at(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

/* 16 bytes of codes, whose low halves come first. */
static void read_halves(const uint8_t *p, block32 *out) {
    for (int i = 0; i < 16; i++) {
        out->q[i] = p[i] & 15;
        out->q[i + 16] = p[i] >> 4;
    }
}

/* Q4_0, Q4_1, Q5_0, Q5_1 and IQ4_NL. */
static void read_small_block(const fr_layout *l, const uint8_t *p, block32 *out) {
    out->d = half_at(p);
    p += 2;
    if (l->scales == DM) {
        out->m = half_at(p);
        p += 2;
    }
    const uint8_t *high = p;
    if (l->bits == 5) p += 4;
    read_halves(p, out);
    if (l->bits != 5) return;
    for (int i = 0; i < 32; i++)
        out->q[i] |= (uint8_t)((high[i / 8] >> i % 8 & 1) << 4);
}

/* The file's codes are signed. */
static void read_q8_0(const uint8_t *p, block32 *out) {
    out->d = half_at(p);
    for (int i = 0; i < 32; i++)
        out->q[i] = p[2 + i] ^ 0x80;
}

/* Block j of 8. Two blocks share 32 bytes of codes, a half of each byte. The 12 bytes of scales
   hold 6 bits of each of 8 scales and 8 minimums. */
static void read_q4_q5_k(int bits, const uint8_t *p, int j, block32 *out) {
    const uint8_t *s = p + 4;
    const uint8_t *high = p + 16;
    const uint8_t *codes = p + (bits == 5 ? 48 : 16) + 32 * (j / 2);
    out->d = half_at(p);
    out->m = half_at(p + 2);
    for (int i = 0; i < 32; i++)
        out->q[i] = codes[i] >> 4 * (j % 2) & 15;
    for (int i = 0; bits == 5 && i < 32; i++)
        out->q[i] |= (uint8_t)((high[i] >> j & 1) << 4);
    if (j < 4) {
        out->sc[0] = s[j] & 63;
        out->mn[0] = s[j + 4] & 63;
    } else {
        out->sc[0] = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        out->mn[0] = s[j + 4] >> 4 | (s[j] >> 6) << 4;
    }
}

/* Four blocks share 64 bytes of codes and 32 bytes of high bits. */
static void read_q6_k(const uint8_t *p, int j, block32 *out) {
    const uint8_t *codes = p + 64 * (j / 4) + 32 * (j % 2);
    const uint8_t *high = p + 128 + 32 * (j / 4);
    for (int i = 0; i < 32; i++) {
        int low_bits = codes[i] >> 4 * (j % 4 / 2) & 15;
        int high_bits = high[i] >> 2 * (j % 4) & 3;
        out->q[i] = (uint8_t)(low_bits | high_bits << 4);
    }
    memcpy(out->sc, p + 192 + 2 * j, 2);
    out->d = half_at(p + 208);
}

/* A weight is -4 to 3, and becomes a code of Q6_K, from which 32 is subtracted. The scales have 6
   bits, 4 of them in the first 8 bytes and 2 in the last 4. */
static void read_q3_k(const uint8_t *p, int j, block32 *out) {
    const uint8_t *codes = p + 32 + 32 * (j / 4);
    const uint8_t *s = p + 96;
    for (int i = 0; i < 32; i++) {
        int low_bits = codes[i] >> 2 * (j % 4) & 3;
        int high_bit = p[i] >> j & 1;
        out->q[i] = (uint8_t)(low_bits + 4 * high_bit + 28);
    }
    for (int h = 0; h < 2; h++) {
        int i = 2 * j + h;
        int low_bits = s[i % 8] >> 4 * (i / 8) & 15;
        int high_bits = s[8 + i % 4] >> 2 * (i / 4) & 3;
        out->sc[h] = (uint8_t)((low_bits | high_bits << 4) - 32);
    }
    out->d = half_at(p + 108);
}

/* The code gets the offset of 32 that the layout subtracts. */
static void read_q2_k(const uint8_t *p, int j, block32 *out) {
    const uint8_t *codes = p + 16 + 32 * (j / 4);
    for (int i = 0; i < 32; i++)
        out->q[i] = (uint8_t)((codes[i] >> 2 * (j % 4) & 3) + 32);
    for (int h = 0; h < 2; h++) {
        out->sc[h] = p[2 * j + h] & 15;
        out->mn[h] = p[2 * j + h] >> 4;
    }
    out->d = half_at(p + 80);
    out->m = half_at(p + 82);
}

/* The file's scales have 6 bits, and are more by 32. */
static void read_iq4_xs(const uint8_t *p, int j, block32 *out) {
    int low_bits = p[4 + j / 2] >> 4 * (j % 2) & 15;
    int high_bits = half_at(p + 2) >> 2 * j & 3;
    out->sc[0] = (uint8_t)((low_bits | high_bits << 4) - 32);
    out->d = half_at(p);
    read_halves(p + 8 + 16 * j, out);
}

static void read_wide(const uint8_t *p, int j, block32 *out) {
    const uint8_t *codes = p + 18 + 16 * j;
    for (int i = 0; i < 32; i++)
        out->q[i] = codes[i / 2] >> 4 * (i % 2) & 15;
    memcpy(out->sc, p + 2 + 2 * j, 2);
    out->d = half_at(p);
}

/* Reads block b, of 32 inputs, of a row in the file, with its codes as the panels hold them. */
static void read_block(int format, const uint8_t *row, size_t b, block32 *out) {
    const fr_layout *l = &fr_layouts[format];
    const uint8_t *p = row + b * 32 / l->block_inputs * l->block_bytes;
    int j = (int)(b % 8);
    switch (format) {
    case FR_Q4_0:
    case FR_Q4_1:
    case FR_Q5_0:
    case FR_Q5_1:
    case FR_IQ4_NL: read_small_block(l, p, out); break;
    case FR_MXFP4:
        out->sc[0] = p[0];
        read_halves(p + 1, out);
        break;
    case FR_IQ4_XS: read_iq4_xs(p, j, out); break;
    case FR_Q8_0: read_q8_0(p, out); break;
    case FR_Q4_K:
    case FR_Q5_K: read_q4_q5_k(l->bits, p, j, out); break;
    case FR_Q6_K: read_q6_k(p, j, out); break;
    case FR_Q3_K: read_q3_k(p, j, out); break;
    case FR_Q2_K: read_q2_k(p, j, out); break;
    case FR_IQ12_WIDE:
    case FR_IQ3_XXS_WIDE:
    case FR_IQ3_S_WIDE: read_wide(p, j, out); break;
    default: break;
    }
}

/* Where the parts of a block are in a panel. */
typedef struct {
    uint8_t *codes, *scales;
    uint8_t *group; /* the scales that its group has for itself */
} block_place;

static size_t panel_bytes(const fr_layout *l, size_t inputs) {
    if (l->scales == FLOATS) return l->unit_bytes * inputs;
    /* Layouts with scales of groups have no group of fewer blocks. */
    return l->unit_bytes * (inputs / 32) + l->group_bytes * (inputs / 256);
}

static block_place find_block(const fr_layout *l, uint8_t *panel, size_t blocks, size_t block) {
    size_t first = block / 8 * 8;
    size_t count = blocks - first < 8 ? blocks - first : 8;
    size_t code_bytes = 64 * (size_t)l->bits;
    size_t scale_bytes = l->unit_bytes - code_bytes;
    uint8_t *group = panel + l->unit_bytes * first + l->group_bytes * (block / 8);
    return (block_place){
        .codes = group + code_bytes * (block % 8),
        .scales = group + code_bytes * count + scale_bytes * (block % 8),
        .group = group + l->unit_bytes * count,
    };
}

/* Writes a block's codes to the bytes of one output; `at` is where these begin. A word has four
   codes, one in each byte. */
static void put_codes(int bits, uint8_t *at, const uint8_t values[32]) {
    uint32_t q[8];
    uint32_t words[8];
    memcpy(q, values, 32);
    for (int i = 0; i < bits; i++) {
        switch (bits) {
        case 4: words[i] = q[2 * i] | q[2 * i + 1] << 4; break;
        case 6: {
            uint32_t last = q[i / 3 * 4 + 3];
            words[i] = q[i / 3 * 4 + i % 3] | (last >> (4 - 2 * (i % 3)) & 0x03030303) << 6;
            break;
        }
        default: words[i] = q[i]; break;
        }
    }
    if (bits == 5) {
        words[0] |= (q[5] >> 2 & 0x07070707) << 5;
        words[1] |= (q[5] & 0x03030303) << 6 | (q[7] >> 1 & 0x01010101) << 5;
        words[2] |= (q[6] >> 2 & 0x07070707) << 5;
        words[3] |= (q[6] & 0x03030303) << 6 | (q[7] & 0x01010101) << 5;
        words[4] |= (q[7] >> 2 & 0x07070707) << 5;
    }
    for (int i = 0; i < bits; i++)
        memcpy(at + 64 * i, &words[i], 4);
}

/* Reads what put_codes wrote. */
static void get_codes(int bits, const uint8_t *at, uint8_t values[32]) {
    uint32_t q[8] = {0};
    uint32_t words[8];
    for (int i = 0; i < bits; i++)
        memcpy(&words[i], at + 64 * i, 4);
    for (int i = 0; i < bits; i++) {
        switch (bits) {
        case 4:
            q[2 * i] = words[i] & 0x0f0f0f0f;
            q[2 * i + 1] = words[i] >> 4 & 0x0f0f0f0f;
            break;
        case 5: q[i] = words[i] & 0x1f1f1f1f; break;
        case 6:
            q[i / 3 * 4 + i % 3] = words[i] & 0x3f3f3f3f;
            q[i / 3 * 4 + 3] |= (words[i] >> 6 & 0x03030303) << (4 - 2 * (i % 3));
            break;
        default: q[i] = words[i]; break;
        }
    }
    if (bits == 5) {
        q[5] = (words[0] >> 3 & 0x1c1c1c1c) | (words[1] >> 6 & 0x03030303);
        q[6] = (words[2] >> 3 & 0x1c1c1c1c) | (words[3] >> 6 & 0x03030303);
        q[7] = (words[4] >> 3 & 0x1c1c1c1c) | (words[1] >> 4 & 0x02020202);
        q[7] |= words[3] >> 5 & 0x01010101;
    }
    memcpy(values, q, 32);
}

/* Where the scales of one output are; NULL: the layout lacks them. */
typedef struct {
    uint8_t *d, *m;
    uint8_t *sc[2], *mn[2];
} scale_places;

static scale_places find_scales(int scales, const block_place *block, int lane) {
    int is_of_block = scales == D || scales == DM || scales == NL; /* else of the group */
    int has_minimums = scales == DM || scales == K || scales == SM;
    int halves = fr_has_halves(scales) ? 2 : 1;
    uint8_t *halves_at = is_of_block ? block->scales : block->group;
    scale_places found = {0};
    if (scales != FP4) found.d = halves_at + 2 * lane;
    if (has_minimums) found.m = halves_at + 32 + 2 * lane;
    for (int h = 0; !is_of_block && h < halves; h++) {
        found.sc[h] = block->scales + 16 * h + lane;
        if (has_minimums) found.mn[h] = block->scales + 16 * (halves + h) + lane;
    }
    return found;
}

static void put_block(const fr_layout *l, const block_place *to, int lane, const block32 *block) {
    scale_places scales = find_scales(l->scales, to, lane);
    put_codes(l->bits, to->codes + 4 * lane, block->q);
    if (scales.d) memcpy(scales.d, &block->d, 2);
    if (scales.m) memcpy(scales.m, &block->m, 2);
    for (int h = 0; h < 2; h++) {
        if (scales.sc[h]) *scales.sc[h] = block->sc[h];
        if (scales.mn[h]) *scales.mn[h] = block->mn[h];
    }
}

static void get_block(const fr_layout *l, const block_place *from, int lane, block32 *block) {
    scale_places scales = find_scales(l->scales, from, lane);
    get_codes(l->bits, from->codes + 4 * lane, block->q);
    if (scales.d) memcpy(&block->d, scales.d, 2);
    if (scales.m) memcpy(&block->m, scales.m, 2);
    for (int h = 0; h < 2; h++) {
        if (scales.sc[h]) block->sc[h] = *scales.sc[h];
        if (scales.mn[h]) block->mn[h] = *scales.mn[h];
    }
}

/* 2^(e - 128), which is subnormal below 2. */
static float power_of_two(uint8_t e) {
    uint32_t bits = e < 2 ? 0x200000u << e : (uint32_t)(e - 1) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return power;
}

/* Computes the weights of a block, as layouts.h has them. */
static void block_values(const fr_layout *l, const block32 *block, float *values) {
    float d = float16(block->d);
    float m = float16(block->m);
    if (l->scales == FP4) d = power_of_two(block->sc[0]);
    for (int i = 0; i < 32; i++) {
        int h = fr_has_halves(l->scales) ? i / 16 : 0;
        int q = fr_has_numbers(l->scales) ? fr_numbers_of(l->scales)[block->q[i]] : block->q[i];
        float sc = (float)block->sc[h];
        float mn = (float)block->mn[h];
        float value = 0;
        switch (l->scales) {
        case D: value = d * (float)(q - (1 << (l->bits - 1))); break;
        case DM: value = d * (float)q + m; break;
        case K: value = d * sc * (float)q - m * mn; break;
        case S: value = d * (float)(int8_t)block->sc[h] * (float)(q - 32); break;
        case SM: value = d * sc * (float)(q - 32) - m * mn; break;
        case NL:
        case FP4: value = d * (float)(q - 128); break;
        case XS: value = d * (float)(int8_t)block->sc[0] * (float)(q - 128); break;
        case W12:
        case W3X:
        case W3S: value = d * 0.125f * sc * (float)(q - 128); break;
        default: break;
        }
        values[i] = value;
    }
}

/* Reads 8 floats. */
static void float_values(const fr_layout *l, const uint8_t *p, float *values) {
    if (l->layout == FR_F32) {
        store8(values, load8((const float *)(const void *)p));
    } else if (l->layout == FR_F16) {
        store8(values, float16s(p));
    } else {
        store8(values, bfloat16s(p));
    }
}

size_t fr_panel_bytes(int format, int outputs, int inputs, int32_t *layout) {
    if (format < 0 || format >= FR_FORMATS || outputs < 1 || inputs < 1) return 0;
    const fr_layout *l = &fr_layouts[format];
    if (inputs % l->block_inputs) return 0;
    size_t panels = ((size_t)outputs + FR_PANEL - 1) / FR_PANEL;
    size_t bytes = panel_bytes(&fr_layouts[l->layout], (size_t)inputs);
    if (bytes > SIZE_MAX / panels) return 0;
    if (layout) *layout = l->layout;
    return bytes * panels;
}

/* Packs one output of floats, whose row has so many bytes. */
static void pack_floats(const uint8_t *from, size_t row_bytes, size_t float_bytes, uint8_t *panel,
                        size_t lane) {
    size_t step = 64 * float_bytes;
    for (size_t i = 0; i < row_bytes; i += step) {
        size_t part = row_bytes - i < step ? row_bytes - i : step;
        memcpy(panel + FR_PANEL * i + lane * part, from + i, part);
    }
}

/* Packs one output of few bits. */
static void pack_blocks(int format, const uint8_t *from, size_t blocks, uint8_t *panel, int lane) {
    const fr_layout *to = &fr_layouts[fr_layouts[format].layout];
    for (size_t b = 0; b < blocks; b++) {
        block32 block;
        read_block(format, from, b, &block);
        block_place place = find_block(to, panel, blocks, b);
        put_block(to, &place, lane, &block);
    }
}

int fr_pack(int format, const void *rows, size_t bytes, int outputs, int inputs, void *panels,
            int first_panel, int end_panel) {
    size_t all_bytes = fr_panel_bytes(format, outputs, inputs, NULL);
    if (!all_bytes || !rows || !panels) return -1;
    int count = (outputs - 1) / FR_PANEL + 1;
    if (first_panel < 0 || end_panel > count || first_panel > end_panel) return -1;
    const fr_layout *l = &fr_layouts[format];
    size_t row_bytes = (size_t)inputs / l->block_inputs * l->block_bytes;
    size_t own_bytes = all_bytes / (size_t)count;
    if (bytes / row_bytes < (size_t)outputs) return -1;
    for (int p = first_panel; p < end_panel; p++) {
        uint8_t *panel = (uint8_t *)panels + own_bytes * (size_t)p;
        memset(panel, 0, own_bytes); /* the last panel has outputs that the matrix lacks */
        for (int lane = 0; lane < FR_PANEL && p * FR_PANEL + lane < outputs; lane++) {
            size_t output = (size_t)p * FR_PANEL + (size_t)lane;
            const uint8_t *from = (const uint8_t *)rows + row_bytes * output;
            if (l->scales == FLOATS) {
                pack_floats(from, row_bytes, l->bits / 8, panel, (size_t)lane);
            } else {
                pack_blocks(format, from, (size_t)inputs / 32, panel, lane);
            }
        }
    }
    return 0;
}

/* Reads one output of floats. */
static void unpack_floats(const fr_layout *l, const uint8_t *panel, size_t inputs, size_t lane,
                          float *values) {
    size_t float_bytes = l->bits / 8;
    for (size_t i = 0; i < inputs; i += 8) {
        size_t first = i & ~(size_t)63;
        size_t part = inputs - first < 64 ? inputs - first : 64;
        size_t at = FR_PANEL * first + lane * part + (i - first);
        float_values(l, panel + float_bytes * at, values + i);
    }
}

int fr_unpack(const fr_matrix *m, int output, float *values) {
    size_t all_bytes = fr_panel_bytes(m->layout, m->outputs, m->inputs, NULL);
    if (!all_bytes || output < 0 || output >= m->outputs) return -1;
    const fr_layout *l = &fr_layouts[m->layout];
    size_t inputs = (size_t)m->inputs;
    size_t blocks = inputs / 32;
    int lane = output % FR_PANEL;
    const uint8_t *panel = m->panels + panel_bytes(l, inputs) * ((size_t)output / FR_PANEL);
    if (l->scales == FLOATS) {
        unpack_floats(l, panel, inputs, (size_t)lane, values);
        return 0;
    }
    for (size_t b = 0; b < blocks; b++) {
        block32 block = {0};
        block_place place = find_block(l, (uint8_t *)panel, blocks, b);
        get_block(l, &place, lane, &block);
        block_values(l, &block, values + 32 * b);
    }
    return 0;
}

int fr_values(int format, const void *row, size_t bytes, int inputs, float *values) {
    if (!fr_panel_bytes(format, 1, inputs, NULL)) return -1;
    const fr_layout *l = &fr_layouts[format];
    if (bytes / l->block_bytes < (size_t)inputs / l->block_inputs) return -1;
    if (l->scales == FLOATS) {
        for (size_t i = 0; i < (size_t)inputs; i += 8)
            float_values(l, (const uint8_t *)row + i * l->bits / 8, values + i);
        return 0;
    }
    for (size_t b = 0; b < (size_t)inputs / 32; b++) {
        block32 block = {0};
        read_block(format, row, b, &block);
        block_values(&fr_layouts[l->layout], &block, values + 32 * b);
    }
    return 0;
}

int fr_is_float(int layout) {
    return layout >= 0 && layout < FR_FORMATS && fr_layouts[layout].scales == FLOATS;
}
