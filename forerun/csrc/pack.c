/* Packing files' rows into panels and reading exact values back: plain C, the same on every CPU. */
#include "layouts.h"
#include "vectors.h"

#define X(format, bits, scales, scale_bytes, group, block, inputs, layout) \
    {bits, scales, FR_UNIT_BYTES(bits, scale_bytes), group, block, inputs, layout},
const fr_layout fr_layouts[FR_FORMATS] = {FR_LAYOUTS(X)};
#undef X

/* 32 weights: codes as panels hold them, scales and minimums of each 16 (K formats), d and m as
   float16. */
typedef struct {
    uint8_t q[32], sc[2], mn[2];
    uint16_t d, m;
} block32;

static uint16_t half_at(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

/* Block b (of 32 inputs) of a row in the file, its codes as the panels hold them. */
static void read_block(int format, const uint8_t *row, size_t b, block32 *out) {
    const fr_layout *l = &fr_layouts[format];
    const uint8_t *p = row + b * 32 / l->inputs * l->block, *qs = p, *high, *s;
    int j = (int)(b % 8), odd = j % 2, shift = 2 * (j % 4); /* of a K block's 8 */
    switch (format) {
    case FR_Q4_0:
    case FR_Q4_1:
    case FR_Q5_0:
    case FR_Q5_1:
        out->d = half_at(p), qs = p + 2;
        if (l->scales == DM) out->m = half_at(qs), qs += 2;
        high = qs;
        if (l->bits == 5) qs += 4;
        for (int i = 0; i < 16; i++) out->q[i] = qs[i] & 15, out->q[i + 16] = qs[i] >> 4;
        if (l->bits == 5)
            for (int i = 0; i < 32; i++) out->q[i] |= (uint8_t)((high[i / 8] >> i % 8 & 1) << 4);
        break;
    case FR_Q8_0:
        out->d = half_at(p);
        for (int i = 0; i < 32; i++) out->q[i] = p[2 + i] ^ 0x80;
        break;
    case FR_Q4_K:
    case FR_Q5_K:
        out->d = half_at(p), out->m = half_at(p + 2), s = p + 4, high = p + 16;
        qs = p + (format == FR_Q5_K ? 48 : 16) + 32 * (j / 2);
        for (int i = 0; i < 32; i++) out->q[i] = qs[i] >> 4 * odd & 15;
        if (format == FR_Q5_K)
            for (int i = 0; i < 32; i++) out->q[i] |= (uint8_t)((high[i] >> j & 1) << 4);
        out->sc[0] = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        out->mn[0] = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | (s[j] >> 6) << 4;
        break;
    case FR_Q6_K:
        out->d = half_at(p + 208), qs = p + 64 * (j / 4) + 32 * odd, high = p + 128 + 32 * (j / 4);
        for (int i = 0; i < 32; i++) out->q[i] = (uint8_t)((qs[i] >> 4 * (j % 4 / 2) & 15) | (high[i] >> shift & 3) << 4);
        memcpy(out->sc, p + 192 + 2 * j, 2);
        break;
    case FR_Q3_K: /* 2 bits and a high one, -4 to 3 */
        out->d = half_at(p + 108), qs = p + 32 + 32 * (j / 4), s = p + 96;
        for (int i = 0; i < 32; i++) out->q[i] = (uint8_t)((qs[i] >> shift & 3) + 28 + 4 * (p[i] >> j & 1));
        for (int h = 0; h < 2; h++) {
            int i = 2 * j + h;
            out->sc[h] = (uint8_t)(((s[i % 8] >> 4 * (i / 8) & 15) | (s[8 + i % 4] >> 2 * (i / 4) & 3) << 4) - 32);
        }
        break;
    case FR_Q2_K:
        out->d = half_at(p + 80), out->m = half_at(p + 82), qs = p + 16 + 32 * (j / 4);
        for (int i = 0; i < 32; i++) out->q[i] = (uint8_t)((qs[i] >> shift & 3) + 32);
        for (int h = 0; h < 2; h++) out->sc[h] = p[2 * j + h] & 15, out->mn[h] = p[2 * j + h] >> 4;
        break;
    }
}

/* Where a block is in a panel. */
typedef struct {
    uint8_t *codes, *scales, *group; /* of the block, and of its group */
} place;

static size_t panel_bytes(const fr_layout *l, size_t inputs) {
    if (l->scales == FLOATS) return l->unit * inputs;
    return l->unit * (inputs / 32) + l->group * (inputs / 256); /* with such scales groups are whole */
}

static place block_place(const fr_layout *l, uint8_t *panel, size_t blocks, size_t block) {
    size_t first = block / 8 * 8, in_group = block % 8, code_bytes = 64 * (size_t)l->bits;
    size_t count = blocks - first < 8 ? blocks - first : 8;
    uint8_t *group = panel + l->unit * first + l->group * (block / 8);
    uint8_t *scales = group + code_bytes * count + (l->unit - code_bytes) * in_group;
    return (place){group + code_bytes * in_group, scales, group + l->unit * count};
}

/* Put a block's codes into lane `lane`, or (`get`) read them. A word has four codes, one a byte. */
static void move_codes(int bits, uint8_t *codes, int lane, uint8_t values[32], int get) {
    uint32_t q[8], v;
    uint8_t *at = codes + 4 * lane;
    memcpy(q, values, 32);
#define MOVE(field, place, size) (get ? memcpy(field, place, size) : memcpy(place, field, size))
    for (int t = 0; bits == 8 && t < 8; t++) MOVE(&q[t], at + 64 * t, 4);
    for (int i = 0; bits < 8 && i < 4; i++) {
        v = (q[2 * i] & 0x0f0f0f0f) | (q[2 * i + 1] & 0x0f0f0f0f) << 4;
        MOVE(&v, at + 64 * i, 4);
        if (!get) continue;
        q[2 * i] = v & 0x0f0f0f0f;
        q[2 * i + 1] = v >> 4 & 0x0f0f0f0f;
    }
    if (bits == 5) {
        v = 0;
        for (int t = 0; !get && t < 8; t++) v |= (q[t] >> 4 & 0x01010101) << t;
        MOVE(&v, at + 256, 4);
        for (int t = 0; get && t < 8; t++) q[t] |= (v >> t & 0x01010101) << 4;
    }
    for (int h = 0; bits == 6 && h < 2; h++) {
        v = 0;
        for (int p = 0; !get && p < 4; p++) v |= (q[4 * h + p] >> 4 & 0x03030303) << 2 * p;
        MOVE(&v, at + 256 + 64 * h, 4);
        for (int p = 0; get && p < 4; p++) q[4 * h + p] |= (v >> 2 * p & 0x03030303) << 4;
    }
    if (get) memcpy(values, q, 32);
}

static void move_scales(int scales, const place *at, int lane, block32 *block, int get) {
    int has_own = scales == D || scales == DM, has_minimums = scales != D && scales != S;
    int halves = scales == K ? 1 : 2;
    uint8_t *halfs = has_own ? at->scales : at->group; /* float16 numbers */
    MOVE(&block->d, halfs + 2 * lane, 2);
    if (has_minimums) MOVE(&block->m, halfs + 32 + 2 * lane, 2);
    for (int h = 0; !has_own && h < halves; h++) {
        MOVE(&block->sc[h], at->scales + 16 * h + lane, 1);
        if (has_minimums) MOVE(&block->mn[h], at->scales + 16 * (halves + h) + lane, 1);
    }
#undef MOVE
}

static void move(const fr_layout *l, const place *at, int lane, block32 *block, int get) {
    move_codes(l->bits, at->codes, lane, block->q, get);
    move_scales(l->scales, at, lane, block, get);
}

static void block_values(const fr_layout *l, const block32 *block, float *values) {
    float d = float16(block->d), m = float16(block->m);
    for (int i = 0; i < 32; i++) {
        int q = block->q[i], h = l->scales == K ? 0 : i / 16;
        switch (l->scales) {
        case D: values[i] = d * (float)(q - (1 << (l->bits - 1))); break;
        case DM: values[i] = d * (float)q + m; break;
        case K: values[i] = d * (float)block->sc[h] * (float)q - m * (float)block->mn[h]; break;
        case S: values[i] = d * (float)(int8_t)block->sc[h] * (float)(q - 32); break;
        case SM: values[i] = d * (float)block->sc[h] * (float)(q - 32) - m * (float)block->mn[h]; break;
        }
    }
}

static void float_values(const fr_layout *l, const uint8_t *p, float *values) { /* 8 */
    store8(values, l->bits == 32 ? load8((const float *)(const void *)p) : l->layout == FR_F16 ? float16s(p) : bfloat16s(p));
}

size_t fr_panel_bytes(int format, int outputs, int inputs, int32_t *layout) {
    if (format < 0 || format >= FR_FORMATS || outputs < 1 || inputs < 1 || inputs % fr_layouts[format].inputs) return 0;
    const fr_layout *l = &fr_layouts[format];
    size_t panels = ((size_t)outputs + FR_PANEL - 1) / FR_PANEL;
    size_t bytes = panel_bytes(&fr_layouts[l->layout], (size_t)inputs);
    if (bytes > SIZE_MAX / panels) return 0;
    if (layout) *layout = l->layout;
    return bytes * panels;
}

/* One output's floats. */
static void pack_floats(const uint8_t *from, size_t row, size_t size, uint8_t *panel, size_t output) {
    for (size_t i = 0; i < row; i += 64 * size) {
        size_t part = row - i < 64 * size ? row - i : 64 * size;
        memcpy(panel + FR_PANEL * i + output * part, from + i, part);
    }
}

int fr_pack(int format, const void *rows, size_t bytes, int outputs, int inputs, void *panels, int first_panel, int end_panel) {
    size_t all = fr_panel_bytes(format, outputs, inputs, NULL);
    int last_panel = (outputs - 1) / FR_PANEL;
    if (!all || !rows || !panels || first_panel < 0 || end_panel > last_panel + 1 || first_panel > end_panel) return -1;
    const fr_layout *l = &fr_layouts[format], *to = &fr_layouts[l->layout];
    size_t row = (size_t)inputs / l->inputs * l->block, blocks = (size_t)inputs / 32;
    size_t own = all / ((size_t)last_panel + 1);
    if (bytes / row < (size_t)outputs) return -1;
    for (int panel = first_panel; panel < end_panel; panel++) {
        uint8_t *at = (uint8_t *)panels + own * (size_t)panel;
        memset(at, 0, own); /* outputs that the matrix lacks */
        for (int o = 0; o < FR_PANEL && panel * FR_PANEL + o < outputs; o++) {
            const uint8_t *from = (const uint8_t *)rows + row * ((size_t)panel * FR_PANEL + (size_t)o);
            if (l->scales == FLOATS) {
                pack_floats(from, row, l->bits / 8, at, (size_t)o);
                continue;
            }
            for (size_t b = 0; b < blocks; b++) {
                block32 block;
                place there = block_place(to, at, blocks, b);
                read_block(format, from, b, &block);
                move(to, &there, o, &block, 0);
            }
        }
    }
    return 0;
}

int fr_unpack(const fr_matrix *m, int output, float *values) {
    size_t all = fr_panel_bytes(m->layout, m->outputs, m->inputs, NULL);
    if (!all || output < 0 || output >= m->outputs) return -1;
    const fr_layout *l = &fr_layouts[m->layout];
    size_t blocks = (size_t)m->inputs / 32, o = (size_t)output % FR_PANEL;
    const uint8_t *at = m->panels + panel_bytes(l, (size_t)m->inputs) * ((size_t)output / FR_PANEL);
    if (l->scales == FLOATS) {
        size_t size = l->bits / 8, inputs = (size_t)m->inputs;
        for (size_t i = 0; i < inputs; i += 8) {
            size_t first = i & ~(size_t)63, part = inputs - first < 64 ? inputs - first : 64;
            float_values(l, at + size * (FR_PANEL * first + o * part + i - first), values + i);
        }
        return 0;
    }
    for (size_t b = 0; b < blocks; b++) {
        block32 block = {0};
        place there = block_place(l, (uint8_t *)at, blocks, b);
        move(l, &there, (int)o, &block, 1);
        block_values(l, &block, values + 32 * b);
    }
    return 0;
}

int fr_values(int format, const void *row, size_t bytes, int inputs, float *values) {
    if (!fr_panel_bytes(format, 1, inputs, NULL)) return -1;
    const fr_layout *l = &fr_layouts[format];
    if (bytes / l->block < (size_t)inputs / l->inputs) return -1;
    if (l->scales == FLOATS)
        for (size_t i = 0; i < (size_t)inputs; i += 8) float_values(l, (const uint8_t *)row + i * l->bits / 8, values + i);
    else
        for (size_t b = 0; b < (size_t)inputs / 32; b++) {
            block32 block = {0};
            read_block(format, row, b, &block);
            block_values(&fr_layouts[l->layout], &block, values + 32 * b);
        }
    return 0;
}

int fr_is_float(int layout) { return layout >= 0 && layout < FR_FORMATS && fr_layouts[layout].scales == FLOATS; }
