#include "forward.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
enum { WIDTH = 96, HEADS = 6, GROUPS = 2, SIZE = 16, INNER = 352, LAYERS = 3, VOCABULARY = 157, CAPACITY = 64,
        ROWS = 2 };
static uint32_t state = 1;
static uint32_t next(void) { return state = state * 1664525u + 1013904223u, state >> 8; }
static float *numbers(int n, float size) {
    float *found = malloc(sizeof(float) * n);
    for (int i = 0; i < n; i++) found[i] = size * ((int)(next() % 2001) - 1000) / 1000;
    return found;
}
static fr_matrix matrix(int outputs, int inputs) {
    fr_matrix found = {0, outputs, inputs, NULL};
    size_t size = (fr_panel_bytes(FR_Q4_0, outputs, inputs, &found.layout) + 63) / 64 * 64,
            bytes = (size_t)outputs * inputs / 32 * 18;
    uint8_t *rows = malloc(bytes), *panels = aligned_alloc(64, size);
    for (size_t i = 0; i < bytes; i++) rows[i] = i % 18 == 0 ? next() : i % 18 == 1 ? 0x28 : next();
    /* scales near 1/32 */
    if (fr_pack_all(FR_Q4_0, rows, bytes, outputs, inputs, panels)) exit(5);
    found.panels = panels;
    free(rows);
    return found;
}
int main(int argc, char **argv) { /* variant, threads; out: logits, states, keys and values, what is drafted */
    if (argc != 3 || fr_select(argv[1]) < 0) return 3;
    fr_threads(atoi(argv[2]));
    int kept = GROUPS * SIZE, n = 40;
    fr_layer layers[LAYERS];
    fr_cache caches[LAYERS];
    static uint16_t memory[LAYERS][2][ROWS][GROUPS][CAPACITY][SIZE];
    for (int i = 0; i < LAYERS; i++) {
        layers[i] = (fr_layer){matrix(HEADS * SIZE, WIDTH), matrix(kept, WIDTH), matrix(kept, WIDTH), matrix(WIDTH,
                HEADS * SIZE),
                               matrix(INNER, WIDTH), matrix(INNER, WIDTH), matrix(WIDTH, INNER), numbers(WIDTH, 2),
                                       numbers(WIDTH, 2),
                               numbers(HEADS * SIZE, 1), numbers(kept, 1), numbers(kept, 1), numbers(SIZE, 3),
                                       numbers(SIZE, 3),
                               i == 1 ? 5 : 0, i == 2 ? 0 : SIZE};
        caches[i] = (fr_cache){memory[i][0][0][0][0], memory[i][1][0][0][0], kept * CAPACITY, CAPACITY * SIZE,
                ROWS, CAPACITY};
    }
    fr_model model = {WIDTH, HEADS, GROUPS, SIZE, LAYERS, CAPACITY, VOCABULARY, FR_F32, layers, numbers(WIDTH, 2),
                      numbers(CAPACITY * SIZE / 2, 1), numbers(CAPACITY * SIZE / 2, 1), numbers(VOCABULARY * WIDTH,
                              1), WIDTH * sizeof(float),
                      matrix(VOCABULARY, WIDTH), .eps = 1e-6f};
    int32_t token[40], row[40], slot[40], length[40], seen[40], paths[40][2],
            extra[] = {3, 150}, ends[] = {-1};
    static float logits[40][VOCABULARY + 2], normed[40][WIDTH], probabilities[20];
    for (int i = 0; i < n; i++) { /* row 0: a chain; row 1: pairs of siblings and a child of each second one,
            after the first 10 */
        token[i] = next() % VOCABULARY, row[i] = i >= 20, slot[i] = length[i] = i % 20, seen[i] = 0;
        if (i < 30) length[i]++;
        else seen[i] = 1 + i % 2, length[i] = 10, paths[i][0] = slot[i] - i % 2, paths[i][1] = slot[i];
    }
    fr_batch batch = {.n = n, .path = 2, .tokens = token, .row = row, .slot = slot, .position = slot,
            .length = length, .seen = seen,
                      .paths = paths[0], .normed = normed[0], .asked = slot, .extra = extra,
                      .logits = logits[0], .asks = 20, .extras = 2};
    int32_t drafted[20];
    fr_chain_request chain = {.row = 0, .length = 20, .count = 5, .most = 20, .pending = token, .ends = ends,
            .ended = 1, .drafted = drafted,
                              .probabilities = probabilities, .extra = extra, .extras = 2};
    if (fr_forward(&model, caches, &batch) || fr_chain(&model, caches, &chain) != 20) return 4;
    for (int i = 0; i < 20; i++)
        for (int k = 0; k < VOCABULARY + 2; k++)
            if (!isfinite(logits[i][k])) return 6;
    fwrite(logits, sizeof logits, 1, stdout), fwrite(normed, sizeof normed, 1, stdout);
    fwrite(drafted, sizeof drafted, 1, stdout), fwrite(probabilities, sizeof probabilities, 1, stdout);
    fr_matrix information = matrix(VOCABULARY, 32);
    model.fuse = matrix(WIDTH, 2 * WIDTH), model.alone = matrix(WIDTH, WIDTH);
    int32_t names[VOCABULARY], rows[] = {1, 0}, lengths[] = {20, 3}, counts[] = {3, 1}, limits[] = {20, 4}, olds[] = {4, 0};
    int32_t beams[2][3] = {{0}}, found[2][20][5], parents[2][20][5];
    static float states[20][2][WIDTH], places[20][2][VOCABULARY];
    double values[2][3] = {{0, -INFINITY, -INFINITY}, {0, -INFINITY, -INFINITY}}, worth[2][20][5];
    const float *old[] = {numbers(4 * VOCABULARY, 1), NULL};
    for (int i = 0; i < VOCABULARY; i++) names[i] = i;
    fr_growth growth = {.rows = 2, .n = 4, .most = 20, .width = 3, .nodes = 5, .context = CAPACITY, .row = rows,
            .length = lengths, .count = counts, .limit = limits, .pending = token, .features = numbers(4 * WIDTH, 1),
            .states = states[0][0], .head = &model.head, .names = names, .logits = places[0][0],
            .information = &information, .token_states = numbers(VOCABULARY * 32, 1), .old = old, .olds = olds,
            .curves = numbers(2 * 20 * 2, 1), .beams = beams[0], .values = values[0], .tokens = found[0][0],
            .parents = parents[0][0], .found = worth[0][0]};
    for (int call = 0; call < 2; call++) {
        if (fr_grow(&model, caches, &growth)) return 7 + call;
        fwrite(states, sizeof states, 1, stdout), fwrite(places, sizeof places, 1, stdout);
        fwrite(found, sizeof found, 1, stdout), fwrite(parents, sizeof parents, 1, stdout);
        fwrite(worth, sizeof worth, 1, stdout);
            lengths[0] = 42, lengths[1] = 23, counts[0] = 1, limits[0] = 25, limits[1] = 22;
        growth.n = 2, growth.start = 20, growth.most = 5, growth.features = states[19][0];
    }
    fwrite(logits, sizeof logits, 1, stdout), fwrite(memory, sizeof memory, 1, stdout);
    fwrite(drafted, sizeof drafted, 1, stdout), fwrite(probabilities, sizeof probabilities, 1, stdout);
    return 0;
}
