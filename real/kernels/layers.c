/* The work between a layer's projections, on a CPU: norms, rotary positions, the store of keys and values; and the
   largest logit of a row. Each row is computed by one thread and depends on no other row. Numbers are rounded to their
   format after the same operations as in torch, except between a norm and its weight and within a rotation. */

#include "lines.h"

#define PART 64     /* numbers that are compared together, so that the compiler uses vectors */
#define GRAIN 32768 /* more elements than this are worth a second thread */
#define TEXT(pragma) _Pragma(#pragma)
#define FOR_ROWS(rows, elements) \
  TEXT(omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1 && (elements) > GRAIN)) \
  for (int64_t row = 0; row < (rows); row++)

/* Returns the factor that brings the mean square of `size` numbers to 1. squares: the sum of their squares. */
static INLINE float scale_of(float squares, int64_t size, float eps) {
  return 1.0f / sqrtf(squares / (float)size + eps);
}

/* Adds residual (null: none) to x in place, for `size` elements from `at` on; writes the sum over its root mean square,
   times the weight, to output. */
static INLINE void normalize(void *x, const void *residual, const void *weight, void *output, int64_t at, int64_t size,
                             float eps, int is_half) {
  float squares = 0.0f;
  if (residual)
    for (int64_t i = 0; i < size; i++) put(x, at + i, get(x, at + i, is_half) + get(residual, at + i, is_half), is_half);
  for (int64_t i = 0; i < size; i++) squares += get(x, at + i, is_half) * get(x, at + i, is_half);
  const float scale = scale_of(squares, size, eps);
  for (int64_t i = 0; i < size; i++)
    put(output, at + i, get(x, at + i, is_half) * scale * get(weight, i, is_half), is_half);
}

/* x, residual, output [rows, size], weight [size]. */
void normalize_rows(void *x, const void *residual, const void *weight, void *output, int64_t rows, int64_t size,
                    float eps, int is_half, int num_threads) {
  FOR_ROWS(rows, rows * size)
  if (is_half)
    normalize(x, residual, weight, output, row * size, size, eps, 1);
  else
    normalize(x, residual, weight, output, row * size, size, eps, 0);
}

/* The struct _Heads of real/kernels/host_layers.py. Strides: elements from one token to the next; the heads of a token
   are contiguous, in the cache too. */
typedef struct {
  void *query, *key, *key_cache, *value_cache;
  const void *value, *query_weight, *key_weight; /* weights [dim]; null: no norm */
  const void *cos, *sin;                         /* [tokens, dim / 2] */
  const int64_t *slots;                          /* [tokens], below 0: nothing is stored */
  int64_t tokens, heads, kv_heads, dim, query_stride, key_stride, value_stride;
  float eps;
} Heads;

static INLINE void turn(const Heads *h, void *x, int64_t at, const void *weight, int64_t angles, int64_t half,
                        int is_half) {
  float first[half], second[half];
  load(x, at, first, half, is_half);
  load(x, at + half, second, half, is_half);
  if (weight) {
    float squares = 0.0f;
    for (int64_t i = 0; i < half; i++) squares += first[i] * first[i] + second[i] * second[i];
    const float scale = scale_of(squares, 2 * half, h->eps);
    for (int64_t i = 0; i < half; i++) {
      first[i] = rounded(first[i] * scale * get(weight, i, is_half), is_half);
      second[i] = rounded(second[i] * scale * get(weight, half + i, is_half), is_half);
    }
  }
  for (int64_t i = 0; i < half; i++) {
    const float cos = get(h->cos, angles + i, is_half), sin = get(h->sin, angles + i, is_half), before = first[i];
    first[i] = before * cos - second[i] * sin;
    second[i] = second[i] * cos + before * sin;
  }
  store(x, at, first, half, is_half);
  store(x, at + half, second, half, is_half);
}

static INLINE void turn_and_store(const Heads *h, int64_t token, int64_t dim, int is_half) {
  const int64_t half = dim / 2, width = h->kv_heads * dim, slot = h->slots[token], size = is_half ? 2 : 4;
  const int64_t query = token * h->query_stride, key = token * h->key_stride, value = token * h->value_stride;
  for (int64_t head = 0; head < h->heads; head++)
    turn(h, h->query, query + head * dim, h->query_weight, token * half, half, is_half);
  for (int64_t head = 0; head < h->kv_heads; head++)
    turn(h, h->key, key + head * dim, h->key_weight, token * half, half, is_half);
  if (slot < 0) return;
  memcpy((char *)h->key_cache + slot * width * size, (const char *)h->key + key * size, (size_t)(width * size));
  memcpy((char *)h->value_cache + slot * width * size, (const char *)h->value + value * size, (size_t)(width * size));
}

#define OF_SIZE(number) \
  case number: turn_and_store(h, token, number, is_half); break;

static INLINE void turn_and_store_token(const Heads *h, int64_t token, int is_half) {
  switch (h->dim) { /* faster for sizes that are known at compile time */
    OF_SIZE(64) OF_SIZE(128)
    default: turn_and_store(h, token, h->dim, is_half);
  }
}

void turn_and_store_heads(const Heads *h, int is_half, int num_threads) {
  FOR_ROWS(h->tokens, h->tokens * (h->heads + h->kv_heads) * h->dim)
  if (is_half)
    turn_and_store_token(h, row, 1);
  else
    turn_and_store_token(h, row, 0);
}

static INLINE float larger(float x, float y) { return x > y || x != x ? x : y; } /* NaN if one is NaN */

static INLINE float largest(const float *x, int64_t size) {
  float most[PART], of_all = -INFINITY;
  int64_t i = 0;
  for (int j = 0; j < PART; j++) most[j] = -INFINITY;
  for (; i + PART <= size; i += PART)
    for (int j = 0; j < PART; j++) most[j] = larger(x[i + j], most[j]);
  for (int j = 0; j < PART; j++) of_all = larger(most[j], of_all);
  for (; i < size; i++) of_all = larger(x[i], of_all);
  return of_all;
}

static INLINE int is(float x, float wanted) { return x == wanted || (x != x && wanted != wanted); }

/* Whether `wanted` is among PART numbers. */
static INLINE int holds(const float *x, float wanted) {
  int num = 0;
  for (int j = 0; j < PART; j++) num += is(x[j], wanted);
  return num > 0;
}

/* Writes the index of the first largest number of each row to places. x: float32 [rows, size]. */
void argmax_rows(const float *x, int64_t *places, int64_t rows, int64_t size, int num_threads) {
  FOR_ROWS(rows, rows * size) {
    const float *const line = x + row * size;
    const float most = largest(line, size);
    int64_t place = 0;
    while (place + PART < size && !holds(line + place, most)) place += PART;
    while (place < size - 1 && !is(line[place], most)) place++;
    places[row] = place;
  }
}
