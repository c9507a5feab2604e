/* Runs forwards, a drafted chain and two drafted trees of a small made-up model, and writes all
   results to stdout, so that tests can compare their bits.

     forward VARIANT THREADS

   Ends with 3 if this processor lacks the variant, and with another number if something fails. */
#include "chains.h"
#include "forward.h"
#include "multiply.h"
#include "streams.h"
#include "system.h"
#include "trees.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    WIDTH = 96,
    HEADS = 6,
    GROUPS = 2,
    SIZE = 16,
    KEY_WIDTH = GROUPS * SIZE,
    INNER = 352,
    LAYERS = 3,
    VOCABULARY = 157,
    CAPACITY = 64,
    ROWS = 2,
    TOKENS = 40,
    EXTRAS = 2,
    MAX_DRAFT = 20,
    LATER_DRAFT = 5,
    BEAMS = 3,
    NODES = 5,
    INFORMATION = 32,
    OLDS = 4,
};

static fr_layer layers[LAYERS];
static fr_rotation rotation = {.dims = SIZE};
static fr_cache caches[LAYERS];
static uint16_t memory[LAYERS][2][ROWS][GROUPS][CAPACITY][SIZE];

static uint32_t next(void) {
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

/* Made-up numbers within +-size. */
static float *numbers(int n, float size) {
    float *made = malloc(sizeof(float) * n);
    for (int i = 0; i < n; i++)
        made[i] = size * (float)((int)(next() % 2001) - 1000) / 1000;
    return made;
}

/* A matrix in Q4_0 with scales near 1/32. */
static fr_matrix matrix(int outputs, int inputs) {
    fr_matrix m = {0, outputs, inputs, NULL};
    size_t panel_bytes = fr_panel_bytes(FR_Q4_0, outputs, inputs, &m.layout);
    size_t row_bytes = (size_t)outputs * inputs / 32 * 18;
    uint8_t *rows = malloc(row_bytes);
    uint8_t *panels = fr_allocate((int64_t)panel_bytes);
    for (size_t i = 0; i < row_bytes; i++)
        rows[i] = i % 18 == 1 ? 0x28 : next();
    if (fr_pack_all(FR_Q4_0, rows, row_bytes, outputs, inputs, panels)) exit(5);
    m.panels = panels;
    free(rows);
    return m;
}

static void make_layer(fr_layer *layer, int index) {
    layer->q = matrix(HEADS * SIZE, WIDTH);
    layer->k = matrix(KEY_WIDTH, WIDTH);
    layer->v = matrix(KEY_WIDTH, WIDTH);
    layer->o = matrix(WIDTH, HEADS * SIZE);
    layer->gate = matrix(INNER, WIDTH);
    layer->up = matrix(INNER, WIDTH);
    layer->down = matrix(WIDTH, INNER);
    layer->attention_norm.gain = numbers(WIDTH, 2);
    layer->mlp_norm.gain = numbers(WIDTH, 2);
    layer->q_bias = numbers(HEADS * SIZE, 1);
    layer->k_bias = numbers(KEY_WIDTH, 1);
    layer->v_bias = numbers(KEY_WIDTH, 1);
    layer->q_norm = numbers(SIZE, 3);
    layer->k_norm = numbers(SIZE, 3);
    layer->window = index == 1 ? 5 : 0;
    layer->rotation = index == 2 ? -1 : 0;
}

static fr_model make_model(void) {
    for (int i = 0; i < LAYERS; i++) {
        make_layer(&layers[i], i);
        caches[i] = (fr_cache){
            .keys = memory[i][0],
            .values = memory[i][1],
            .row = KEY_WIDTH * CAPACITY,
            .group = CAPACITY * SIZE,
            .rows = ROWS,
            .capacity = CAPACITY,
        };
    }
    fr_model model = {
        .d = WIDTH,
        .heads = HEADS,
        .groups = GROUPS,
        .size = SIZE,
        .layers = LAYERS,
        .positions = CAPACITY,
        .vocabulary = VOCABULARY,
        .embed_format = FR_F32,
        .layer = layers,
        .rotation = &rotation,
        .rotations = 1,
        .embed_row = WIDTH * sizeof(float),
        .eps = 1e-6f,
    };
    model.norm.gain = numbers(WIDTH, 2);
    rotation.cos = numbers(CAPACITY * SIZE / 2, 1);
    rotation.sin = numbers(CAPACITY * SIZE / 2, 1);
    model.embed = numbers(VOCABULARY * WIDTH, 1);
    model.head = matrix(VOCABULARY, WIDTH);
    return model;
}

static float logits[TOKENS][VOCABULARY + EXTRAS];

static int are_finite(void) {
    for (int i = 0; i < 20; i++) {
        for (int k = 0; k < VOCABULARY + EXTRAS; k++) {
            if (!isfinite(logits[i][k])) return 0;
        }
    }
    return 1;
}

/* Fills in the tokens of row 0, a chain of 20, and of row 1, a chain of 10 and then 5 nodes of a
   tree after it, each with a child. */
static void make_tokens(int32_t *token, int32_t *row, int32_t *slot, int32_t *length, int32_t *seen,
                        int32_t (*paths)[2]) {
    for (int i = 0; i < TOKENS; i++) {
        token[i] = (int32_t)(next() % VOCABULARY);
        row[i] = i >= 20;
        slot[i] = i % 20;
        if (i < 30) {
            length[i] = slot[i] + 1;
            seen[i] = 0;
        } else {
            length[i] = 10;
            seen[i] = 1 + i % 2;
            paths[i][0] = slot[i] - i % 2;
            paths[i][1] = slot[i];
        }
    }
}

/* Runs a forward and a chain. Returns 0, or the number to end with. */
static int run_chain(const fr_model *model, int32_t *token) {
    static float normed[TOKENS][WIDTH];
    int32_t row[TOKENS];
    int32_t slot[TOKENS];
    int32_t length[TOKENS];
    int32_t seen[TOKENS];
    int32_t paths[TOKENS][2];
    const int32_t extra[EXTRAS] = {3, 150};
    const int32_t ends[] = {-1};
    int32_t drafted[MAX_DRAFT];
    float probabilities[MAX_DRAFT];
    make_tokens(token, row, slot, length, seen, paths);
    fr_batch batch = {
        .n = TOKENS,
        .path = 2,
        .tokens = token,
        .row = row,
        .slot = slot,
        .position = slot,
        .length = length,
        .seen = seen,
        .paths = paths[0],
        .normed = normed[0],
        .asked = slot,
        .extra = extra,
        .logits = logits[0],
        .asks = 20,
        .extras = EXTRAS,
    };
    fr_chain_request chain = {
        .row = 0,
        .length = 20,
        .count = 5,
        .max_tokens = MAX_DRAFT,
        .pending = token,
        .ends = ends,
        .ended = 1,
        .drafted = drafted,
        .probabilities = probabilities,
        .extra = extra,
        .extras = EXTRAS,
    };
    if (fr_forward(model, caches, &batch)) return 4;
    if (fr_chain(model, caches, &chain) != MAX_DRAFT) return 4;
    if (!are_finite()) return 6;
    fwrite(logits, sizeof logits, 1, stdout);
    fwrite(normed, sizeof normed, 1, stdout);
    fwrite(drafted, sizeof drafted, 1, stdout);
    fwrite(probabilities, sizeof probabilities, 1, stdout);
    return 0;
}

/* Runs two calls of fr_grow, of which the second goes on with the first. */
static int run_trees(fr_model *model, const int32_t *pending) {
    static float states[MAX_DRAFT][ROWS][WIDTH];
    static float places[MAX_DRAFT][ROWS][VOCABULARY];
    static int32_t tokens[ROWS][MAX_DRAFT][NODES];
    static int32_t parents[ROWS][MAX_DRAFT][NODES];
    static double found[ROWS][MAX_DRAFT][NODES];
    fr_matrix information = matrix(VOCABULARY, INFORMATION);
    model->fuse = matrix(WIDTH, 2 * WIDTH);
    model->alone = matrix(WIDTH, WIDTH);
    int32_t names[VOCABULARY];
    for (int i = 0; i < VOCABULARY; i++)
        names[i] = i;
    int32_t rows[ROWS] = {1, 0};
    int32_t lengths[ROWS] = {20, 3};
    int32_t counts[ROWS] = {3, 1};
    int32_t limits[ROWS] = {20, 4};
    int32_t olds[ROWS] = {OLDS, 0};
    int32_t beams[ROWS][BEAMS] = {{0}};
    double values[ROWS][BEAMS] = {{0, -INFINITY, -INFINITY}, {0, -INFINITY, -INFINITY}};
    const float *old[ROWS] = {numbers(OLDS * VOCABULARY, 1), NULL};
    fr_growth growth = {
        .rows = ROWS,
        .n = 4,
        .depth = MAX_DRAFT,
        .width = BEAMS,
        .nodes = NODES,
        .context = CAPACITY,
        .row = rows,
        .length = lengths,
        .count = counts,
        .limit = limits,
        .pending = pending,
        .states = states[0][0],
        .head = &model->head,
        .names = names,
        .logits = places[0][0],
        .information = &information,
        .old = old,
        .olds = olds,
        .beams = beams[0],
        .values = values[0],
        .tokens = tokens[0][0],
        .parents = parents[0][0],
        .found = found[0][0],
    };
    growth.features = numbers(4 * WIDTH, 1);
    growth.token_states = numbers(VOCABULARY * INFORMATION, 1);
    growth.curves = numbers(ROWS * MAX_DRAFT * 2, 1);
    for (int call = 0; call < 2; call++) {
        if (fr_grow(model, caches, &growth)) return 7 + call;
        fwrite(states, sizeof states, 1, stdout);
        fwrite(places, sizeof places, 1, stdout);
        fwrite(tokens, sizeof tokens, 1, stdout);
        fwrite(parents, sizeof parents, 1, stdout);
        fwrite(found, sizeof found, 1, stdout);
        lengths[0] = 42;
        lengths[1] = 23;
        counts[0] = 1;
        limits[0] = MAX_DRAFT + LATER_DRAFT;
        limits[1] = 22;
        growth.n = ROWS;
        growth.start = MAX_DRAFT;
        growth.depth = LATER_DRAFT;
        growth.features = states[MAX_DRAFT - 1][0];
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc != 3 || fr_select(argv[1]) < 0) return 3;
    have_bytes_in_streams();
    fr_threads(atoi(argv[2]));
    fr_model model = make_model();
    int32_t token[TOKENS];
    int failure = run_chain(&model, token);
    if (!failure) failure = run_trees(&model, token);
    fwrite(memory, sizeof memory, 1, stdout);
    return failure;
}
