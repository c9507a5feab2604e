/* Packing files' rows into panels and reading exact values back: plain C, the same on every CPU. */
#include "layouts.h"
#include "vectors.h"

#define X(format, bits, scales, scale_bytes, block, inputs, layout) {bits, scales, FR_UNIT_BYTES(bits, scale_bytes), block, inputs, layout},
const fr_layout fr_layouts[FR_FORMATS] = {FR_LAYOUTS(X)};
#undef X

/* 32 weights: codes, scales and minimums of each 16 (K formats), d and m as float16. */
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
        memcpy(out->q, p + 2, 32);
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

/* Put a block into lane l of a unit, or (`get`) read it. */
static void lane(const fr_layout *l, uint8_t *unit, int lane, block32 *block, int get) {
    uint32_t q[8], v; /* of vector t, this lane's four bytes */
    uint8_t *at = unit + 4 * lane, *scales = unit + 32 * l->bits;
#define MOVE(field, place, size) (get ? memcpy(field, place, size) : memcpy(place, field, size))
    if (!get)
        for (int t = 0; t < 8; t++) memcpy(&q[t], block->q + 16 * (t % 2) + 4 * (t / 2), 4);
    if (l->bits == 8)
        for (int t = 0; t < 8; t++) MOVE(&q[t], at + 32 * t, 4);
    else
        for (int t = 0; t < 4; t++) {
            v = (q[t] & 0x0f0f0f0f) | (q[t + 4] & 0x0f0f0f0f) << 4;
            MOVE(&v, at + 32 * t, 4);
            if (get) q[t] = v & 0x0f0f0f0f, q[t + 4] = v >> 4 & 0x0f0f0f0f;
        }
    if (l->bits == 5) {
        v = 0;
        for (int t = 0; !get && t < 8; t++) v |= (q[t] >> 4 & 0x01010101) << t;
        MOVE(&v, at + 128, 4);
        for (int t = 0; get && t < 8; t++) q[t] |= (v >> t & 0x01010101) << 4;
    }
    for (int h = 0; l->bits == 6 && h < 2; h++) {
        v = 0;
        for (int p = 0; !get && p < 4; p++) v |= (q[2 * p + h] >> 4 & 0x03030303) << 2 * p;
        MOVE(&v, at + 128 + 32 * h, 4);
        for (int p = 0; get && p < 4; p++) q[2 * p + h] |= (v >> 2 * p & 0x03030303) << 4;
    }
    if (get)
        for (int t = 0; t < 8; t++) memcpy(block->q + 16 * (t % 2) + 4 * (t / 2), &q[t], 4);
    if (l->scales <= DM) {
        MOVE(&block->d, scales + 2 * lane, 2);
        if (l->scales == DM) MOVE(&block->m, scales + 16 + 2 * lane, 2);
        return;
    }
    int halves = l->scales == K ? 1 : 2, minimums = l->scales != S;
    for (int h = 0; h < halves; h++) {
        MOVE(&block->sc[h], scales + 8 * h + lane, 1);
        if (minimums) MOVE(&block->mn[h], scales + 8 * (halves + h) + lane, 1);
    }
    scales += 8 * halves * (1 + minimums);
    MOVE(&block->d, scales, 2);
    if (minimums) MOVE(&block->m, scales + 2, 2);
#undef MOVE
}

static void block_values(const fr_layout *l, const block32 *block, float *values) {
    float d = float16(block->d), m = float16(block->m);
    for (int i = 0; i < 32; i++) {
        int q = block->q[i], h = l->scales == K ? 0 : i / 16;
        switch (l->scales) {
        case D: values[i] = d * (float)(l->bits == 8 ? (int8_t)q : q - (l->bits == 4 ? 8 : 16)); break;
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
    size_t panels = ((size_t)outputs + 7) / 8, units = l->scales == FLOATS ? (size_t)inputs : (size_t)inputs / 32;
    size_t bytes = fr_layouts[l->layout].unit * units;
    if (bytes > SIZE_MAX / panels) return 0;
    if (layout) *layout = l->layout;
    return bytes * panels;
}

int fr_pack(int format, const void *rows, size_t bytes, int outputs, int inputs, void *panels, int first_panel, int end_panel) {
    size_t all = fr_panel_bytes(format, outputs, inputs, NULL);
    if (!all || !rows || !panels || first_panel < 0 || end_panel > (outputs - 1) / 8 + 1 || first_panel > end_panel) return -1;
    const fr_layout *l = &fr_layouts[format], *to = &fr_layouts[l->layout];
    size_t row = (size_t)inputs / l->inputs * l->block, panel_bytes = all / ((size_t)(outputs - 1) / 8 + 1);
    if (bytes / row < (size_t)outputs) return -1;
    for (int panel = first_panel; panel < end_panel; panel++) {
        uint8_t *at = (uint8_t *)panels + panel_bytes * (size_t)panel;
        memset(at, 0, panel_bytes); /* outputs that the matrix lacks */
        for (int o = 0; o < 8 && panel * 8 + o < outputs; o++) {
            const uint8_t *from = (const uint8_t *)rows + row * ((size_t)panel * 8 + (size_t)o);
            if (l->scales == FLOATS) {
                size_t size = l->bits / 8, step = 64 * size;
                for (size_t i = 0; i < row; i += step) {
                    size_t part = row - i < step ? row - i : step;
                    memcpy(at + 8 * i + (size_t)o * part, from + i, part);
                }
                continue;
            }
            size_t blocks = (size_t)inputs / 32, whole = blocks & ~(size_t)7;
            for (size_t b = 0; b < blocks; b++) {
                block32 block;
                read_block(format, from, b, &block);
                if (b < whole) lane(to, at + to->unit * (b / 8 * 8 + (size_t)o), (int)(b % 8), &block, 0);
                else lane(to, at + to->unit * b, o, &block, 0);
            }
        }
    }
    return 0;
}

int fr_unpack(const fr_matrix *m, int output, float *values) {
    size_t all = fr_panel_bytes(m->layout, m->outputs, m->inputs, NULL);
    if (!all || output < 0 || output >= m->outputs) return -1;
    const fr_layout *l = &fr_layouts[m->layout];
    size_t blocks = (size_t)m->inputs / 32, whole = blocks & ~(size_t)7, o = (size_t)output % 8;
    const uint8_t *at = m->panels + all / ((size_t)(m->outputs - 1) / 8 + 1) * ((size_t)output / 8);
    if (l->scales == FLOATS) {
        size_t size = l->bits / 8, inputs = (size_t)m->inputs;
        for (size_t i = 0; i < inputs; i += 8) {
            size_t first = i & ~(size_t)63, part = inputs - first < 64 ? inputs - first : 64;
            float_values(l, at + size * (8 * first + o * part + i - first), values + i);
        }
        return 0;
    }
    for (size_t b = 0; b < blocks; b++) {
        block32 block = {0};
        size_t unit = b < whole ? b / 8 * 8 + o : b;
        lane(l, (uint8_t *)at + l->unit * unit, (int)(b < whole ? b % 8 : o), &block, 1);
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
