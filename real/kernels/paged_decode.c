/* Attention of decodes over a paged KV cache, on a CPU: each row's keys and values are read in their blocks, once.

   An item of work is a row and a KV head. Its query heads are computed together, CHUNK positions at a time, with a
   running maximum and sum (Milakov and Gimelshein, 2018). A row's result depends on no other row. */

#include "lines.h"

#define LANES 16 /* floats of a vector; the compiler splits it if the machine's vectors are shorter */
#define TILE 4   /* keys that two queries are multiplied by at a time */
#define WIDE 4   /* vectors of an output that stay in registers */
#define CHUNK 32 /* positions per update of the running maximum */
#define CACHE_LINE 64 /* bytes */

typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4)));
typedef float Four __attribute__((vector_size(16)));

/* The struct _Decode of real/attention/cpu_provider.py. Shapes: query, output [tokens, heads, dim]; keys, values
   [blocks, block_size, kv_heads, dim]; all float32 or all bfloat16; dim is a multiple of LANES. */
typedef struct {
  const void *query, *keys, *values;
  void *output;
  const int64_t *tokens;  /* [rows], token index of each row's query and output */
  const int32_t *tables;  /* [rows, table_stride], block tables */
  const int32_t *lengths; /* [rows], number of positions, the new one included */
  const float *slopes;    /* ALiBi slopes, [heads]; null: none */
  int64_t rows, heads, kv_heads, dim, block_size, table_stride;
  int64_t window; /* positions that a query attends to, its own included; 0: all */
  float scale;
} Decode;

/* Returns where a key or value can be read as floats: in place, or converted into `room`. */
static INLINE const float *line(const void *from, int64_t at, float *room, int64_t dim, int is_half) {
  if (!is_half) return (const float *)from + at;
  load(from, at, room, dim, 1);
  return room;
}

/* Writes the offsets of an item's positions, at most CHUNK from `begin` on, to places; returns how many. */
static INLINE int64_t locate(const Decode *d, int64_t item, int64_t begin, int64_t dim, int64_t *places) {
  const int64_t row = item / d->kv_heads, kv_head = item % d->kv_heads, rest = d->lengths[row] - begin;
  const int32_t *table = d->tables + row * d->table_stride;
  int64_t block = begin / d->block_size, offset = begin % d->block_size, n = 0;
  for (; n < rest && n < CHUNK; n++) {
    places[n] = (((int64_t)table[block] * d->block_size + offset) * d->kv_heads + kv_head) * dim;
    if (++offset == d->block_size) offset = 0, block++;
  }
  return n;
}

static INLINE int64_t first_of(const Decode *d, int64_t item) {
  const int64_t length = d->lengths[item / d->kv_heads];
  return d->window && length > d->window ? length - d->window : 0;
}

/* Prefetches keys or values during other computation: the processor's own prefetcher expects neighbouring addresses,
   and blocks can be anywhere. */
static INLINE void prefetch(const void *from, const int64_t *places, int64_t n, int64_t dim, int is_half) {
  const int64_t size = is_half ? sizeof(uint16_t) : sizeof(float);
  for (int64_t p = 0; p < n; p++)
    for (int64_t byte = 0; byte < dim * size; byte += CACHE_LINE)
      __builtin_prefetch((const char *)from + places[p] * size + byte);
}

static INLINE float sum_of(Lanes x) {
  Four parts[4];
  memcpy(parts, &x, sizeof x);
  const Four four = (parts[0] + parts[1]) + (parts[2] + parts[3]);
  return (four[0] + four[1]) + (four[2] + four[3]);
}

static INLINE void dots(const Lanes *a, const Lanes *b, const float *const *keys, int64_t width, float *of_a, float *of_b) {
  Lanes sum_a[TILE] = {0}, sum_b[TILE] = {0};
  for (int64_t i = 0; i < width; i++)
    for (int k = 0; k < TILE; k++) {
      const Lanes key = ((const Unaligned *)keys[k])[i];
      sum_a[k] += a[i] * key;
      sum_b[k] += b[i] * key;
    }
  for (int k = 0; k < TILE; k++) of_a[k] = sum_of(sum_a[k]), of_b[k] = sum_of(sum_b[k]);
}

static INLINE void add_values(const float *a, const float *b, const float *const *values, int64_t n, int64_t width,
                              Lanes *out_a, Lanes *out_b) {
  for (int64_t i = 0; i < width; i += WIDE) {
    const int64_t num = width - i < WIDE ? width - i : WIDE;
    Lanes sum_a[WIDE], sum_b[WIDE];
    for (int64_t j = 0; j < num; j++) sum_a[j] = out_a[i + j], sum_b[j] = out_b[i + j];
    for (int64_t p = 0; p < n; p++)
      for (int64_t j = 0; j < num; j++) {
        const Lanes value = ((const Unaligned *)values[p])[i + j];
        sum_a[j] += a[p] * value;
        sum_b[j] += b[p] * value;
      }
    for (int64_t j = 0; j < num; j++) out_a[i + j] = sum_a[j], out_b[i + j] = sum_b[j];
  }
}

static INLINE void attend(const Decode *d, int64_t item, int64_t dim, int is_half) {
  const int64_t group = d->heads / d->kv_heads, paired = group + group % 2, width = dim / LANES;
  const int64_t row = item / d->kv_heads, length = d->lengths[row], head = item % d->kv_heads * group;
  const int64_t at = (d->tokens[row] * d->heads + head) * dim;
  const int64_t after = item + (item + 1 < d->rows * d->kv_heads); /* its thread may be another: shared caches help */
  int64_t begin = first_of(d, item), rooms[2][CHUNK], *places = rooms[0], *next = rooms[1];
  Lanes query[paired][width], out[paired][width];
  float most[paired], sum[paired], scores[paired][CHUNK], room[is_half ? CHUNK * dim : 1];
  const float *lines[CHUNK];

  memset(query, 0, sizeof query);
  memset(out, 0, sizeof out);
  for (int64_t q = 0; q < paired; q++) {
    if (q < group) load(d->query, at + q * dim, (float *)query[q], dim, is_half);
    for (int64_t i = 0; i < width; i++) query[q][i] *= d->scale;
    most[q] = -INFINITY;
    sum[q] = 0.0f;
  }
  for (int64_t n = locate(d, item, begin, dim, places), num_next; n; n = num_next) {
    const int64_t tiled = (n + TILE - 1) / TILE * TILE;
    prefetch(d->values, places, n, dim, is_half);
    for (int64_t p = 0; p < n; p++) lines[p] = line(d->keys, places[p], room + p * dim * is_half, dim, is_half);
    for (int64_t p = n; p < tiled; p++) lines[p] = lines[n - 1]; /* multiplied, but the scores are not used */
    for (int64_t q = 0; q < paired; q += 2)
      for (int64_t p = 0; p < tiled; p += TILE)
        dots(query[q], query[q + 1], lines + p, width, scores[q] + p, scores[q + 1] + p);
    for (int64_t q = 0; q < paired; q++) {
      float top = most[q], part = 0.0f;
      if (d->slopes && q < group)
        for (int64_t p = 0; p < n; p++) scores[q][p] += d->slopes[head + q] * (float)(begin + p - length + 1);
      for (int64_t p = 0; p < n; p++) top = scores[q][p] > top ? scores[q][p] : top;
      for (int64_t p = 0; p < n; p++) {
        scores[q][p] = exp_of(scores[q][p] - top);
        part += scores[q][p];
      }
      const float fade = exp_of(most[q] - top);
      for (int64_t i = 0; i < width; i++) out[q][i] *= fade;
      sum[q] = sum[q] * fade + part;
      most[q] = top;
    }
    num_next = locate(d, item, begin += n, dim, next);
    prefetch(d->keys, next, num_next ? num_next : locate(d, after, first_of(d, after), dim, next), dim, is_half);
    for (int64_t p = 0; p < n; p++) lines[p] = line(d->values, places[p], room + p * dim * is_half, dim, is_half);
    for (int64_t q = 0; q < paired; q += 2) add_values(scores[q], scores[q + 1], lines, n, width, out[q], out[q + 1]);
    int64_t *const done = places;
    places = next, next = done;
  }
  for (int64_t q = 0; q < group; q++) {
    for (int64_t i = 0; i < width; i++) out[q][i] /= sum[q];
    store(d->output, at + q * dim, (const float *)out[q], dim, is_half);
  }
}

static INLINE void attend_all(const Decode *d, int64_t dim, int is_half, int num_threads) {
  const int64_t num = d->rows * d->kv_heads;
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_threads > 1)
  for (int64_t item = 0; item < num; item++) attend(d, item, dim, is_half);
}

#define OF_SIZE(number) \
  case number: attend_all(d, number, is_half, num_threads); break;

static INLINE void by_size(const Decode *d, int is_half, int num_threads) {
  switch (d->dim) { /* faster for sizes that are known at compile time */
    OF_SIZE(32) OF_SIZE(64) OF_SIZE(128)
    default: attend_all(d, d->dim, is_half, num_threads);
  }
}

void decode_float32(const Decode *d, int num_threads) { by_size(d, 0, num_threads); }

void decode_bfloat16(const Decode *d, int num_threads) { by_size(d, 1, num_threads); }
