/* Reads and writes arrays of float32 or bfloat16 (is_half) numbers as floats; for the C files of this folder. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE inline __attribute__((always_inline))

static INLINE float get(const void *from, int64_t at, int is_half) {
  if (!is_half) return ((const float *)from)[at];
  const uint32_t bits = (uint32_t)((const uint16_t *)from)[at] << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static INLINE uint16_t half_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16); /* ties to even */
}

static INLINE void put(void *to, int64_t at, float x, int is_half) {
  if (is_half)
    ((uint16_t *)to)[at] = half_of(x);
  else
    ((float *)to)[at] = x;
}

/* Returns x as it would be read back after writing. */
static INLINE float rounded(float x, int is_half) {
  const uint16_t half = half_of(x);
  return is_half ? get(&half, 0, 1) : x;
}

static INLINE void load(const void *from, int64_t at, float *to, int64_t dim, int is_half) {
  for (int64_t i = 0; i < dim; i++) to[i] = get(from, at + i, is_half);
}

static INLINE void store(void *to, int64_t at, const float *from, int64_t dim, int is_half) {
  for (int64_t i = 0; i < dim; i++) put(to, at + i, from[i], is_half);
}

/* Returns e^x for x <= 0, to six digits; at least e^-87. Coefficients: Cephes' expf (Moshier). */
static INLINE float exp_of(float x) {
  x = x < -87.0f ? -87.0f : x;
  const int32_t n = (int32_t)(x * 1.44269504f - 0.5f), bits = (n + 127) << 23;
  const float r = x - (float)n * 0.693359375f + (float)n * 2.12194440e-4f;
  float y = 1.9875691500e-4f, power;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  memcpy(&power, &bits, sizeof power);
  return y * power;
}
