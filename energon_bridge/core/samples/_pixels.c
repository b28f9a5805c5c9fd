/* Pixels for models: resampling as Pillow and torch do it, and bytes to values in the layout of a model. See pixels.py.
   At the end: writing past the caches.

   All release the interpreter lock, and give the same values on every processor: the first is integer arithmetic, the
   second looks values up. With AVX2, products of 16 bits are made and added in pairs, of which a processor makes four
   times as many as of 32 bits; a compiler does not find that by itself. Values of bfloat16 are computed where that gives
   the whole table. With AVX-512 (VNNI and VBMI: Ice Lake, Zen 4 and later) products of 8 bits are added in fours, and
   registers hold the tables. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include "../processor.h"
#include <immintrin.h>
#define WIDE 1 /* where the processor has AVX2 */
#else
#define WIDE 0
#endif

#define CHANNELS 3
#define ROWS 4     /* that are resampled side by side */
#define TAPS 4     /* coefficients that are read at once: behind the last one of an output there are zeros */
#define LOW_BITS 15 /* of a coefficient of two parts */
#define SPARE 64   /* bytes behind a row that may be read with its last pixel */
#define PIECES 3   /* of 8 bits, of a coefficient */

/* How each output along one side is made: of which inputs, and with which coefficients. A coefficient has one part, or
   two where 16 bits are not enough: its low bits and the rest. It has three pieces of 8 bits, too, each with a sign. The
   products of parts, or of pieces, are summed on their own. */
typedef struct {
    Py_ssize_t outputs, most;    /* most: coefficients that each output has room for */
    const int32_t *first, *count; /* of each output */
    const int16_t *low, *high;    /* high: NULL where there is one part */
    const int8_t *pieces;         /* lowest first: of each, TAPS coefficients of all outputs, then the next ones */
    int bits;                     /* of the fraction of a coefficient */
} Side;

static inline int32_t coefficient(const Side *side, Py_ssize_t at) {
    return side->low[at] + (side->high ? side->high[at] * (1 << LOW_BITS) : 0);
}

static inline uint8_t clipped(int32_t sum, int bits) {
    sum >>= bits;
    return sum < 0 ? 0 : sum > 255 ? 255 : (uint8_t)sum;
}

static void resample_rows(const uint8_t *const rows[ROWS], uint8_t *const outs[ROWS], const Side *side) {
    for (int row = 0; row < ROWS; row++)
        for (Py_ssize_t x = 0; x < side->outputs; x++) {
            const uint8_t *from = rows[row] + (Py_ssize_t)side->first[x] * CHANNELS;
            int32_t red = 1 << (side->bits - 1), green = red, blue = red;
            for (int32_t i = 0; i < side->count[x]; i++, from += CHANNELS) {
                int32_t k = coefficient(side, x * side->most + i);
                red += k * from[0];
                green += k * from[1];
                blue += k * from[2];
            }
            uint8_t *to = outs[row] + x * CHANNELS;
            to[0] = clipped(red, side->bits), to[1] = clipped(green, side->bits), to[2] = clipped(blue, side->bits);
        }
}

static void resample_column(const uint8_t *first, Py_ssize_t row, Py_ssize_t from, Py_ssize_t to, uint8_t *out,
                            const Side *side, Py_ssize_t y) {
    for (Py_ssize_t x = from; x < to; x++) {
        int32_t sum = 1 << (side->bits - 1);
        for (int32_t i = 0; i < side->count[y]; i++)
            sum += coefficient(side, y * side->most + i) * first[i * row + x];
        out[x] = clipped(sum, side->bits);
    }
}

#if WIDE
#define WITH_AVX2 __attribute__((target("avx2")))
#define INSIDE WITH_AVX2 __attribute__((always_inline)) static inline

/* Four pixels at a time, in pairs: a pair of bytes of a channel is multiplied and added in one step. */
INSIDE void rows_in_parts(const uint8_t *const rows[ROWS], uint8_t *const outs[ROWS], const Side *side, int parts) {
    const __m256i pairs = _mm256_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1,
                                           6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1);
    const __m256i both = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
    const __m256i half = _mm256_zextsi128_si256(_mm_set1_epi32(1 << (side->bits - 1)));
    const __m128i bits = _mm_cvtsi32_si128(side->bits);
    for (Py_ssize_t x = 0; x < side->outputs; x++) {
        const int16_t *low = side->low + x * side->most, *high = parts > 1 ? side->high + x * side->most : NULL;
        Py_ssize_t at = (Py_ssize_t)side->first[x] * CHANNELS;
        __m256i sums[ROWS], more[ROWS];
        for (int row = 0; row < ROWS; row++)
            sums[row] = half, more[row] = _mm256_setzero_si256();
        for (int32_t i = 0; i < side->count[x]; i += TAPS, at += TAPS * CHANNELS) {
            __m256i by = _mm256_castsi128_si256(_mm_loadl_epi64((const __m128i *)(low + i))), by_high;
            by = _mm256_permutevar8x32_epi32(by, both);
            if (parts > 1) {
                by_high = _mm256_castsi128_si256(_mm_loadl_epi64((const __m128i *)(high + i)));
                by_high = _mm256_permutevar8x32_epi32(by_high, both);
            }
            for (int row = 0; row < ROWS; row++) {
                __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(rows[row] + at)));
                bytes = _mm256_shuffle_epi8(bytes, pairs);
                sums[row] = _mm256_add_epi32(sums[row], _mm256_madd_epi16(bytes, by));
                if (parts > 1)
                    more[row] = _mm256_add_epi32(more[row], _mm256_madd_epi16(bytes, by_high));
            }
        }
        for (int row = 0; parts > 1 && row < ROWS; row++)
            sums[row] = _mm256_add_epi32(sums[row], _mm256_slli_epi32(more[row], LOW_BITS));
        __m256i even = _mm256_add_epi32(_mm256_permute2x128_si256(sums[0], sums[1], 0x20), /* rows 0 and 1 */
                                        _mm256_permute2x128_si256(sums[0], sums[1], 0x31));
        __m256i odd = _mm256_add_epi32(_mm256_permute2x128_si256(sums[2], sums[3], 0x20),
                                       _mm256_permute2x128_si256(sums[2], sums[3], 0x31));
        even = _mm256_packs_epi32(_mm256_sra_epi32(even, bits), _mm256_sra_epi32(odd, bits));
        even = _mm256_packus_epi16(even, even);
        uint64_t low_lane = (uint64_t)_mm_cvtsi128_si64(_mm256_castsi256_si128(even));
        uint64_t high_lane = (uint64_t)_mm_cvtsi128_si64(_mm256_extracti128_si256(even, 1));
        const uint32_t pixels[ROWS] = {(uint32_t)low_lane, (uint32_t)high_lane, low_lane >> 32, high_lane >> 32};
        if (x + 1 < side->outputs)
            for (int row = 0; row < ROWS; row++)
                memcpy(outs[row] + x * CHANNELS, &pixels[row], 4); /* the fourth byte is the next pixel's */
        else
            for (int row = 0; row < ROWS; row++)
                memcpy(outs[row] + x * CHANNELS, &pixels[row], CHANNELS);
    }
}

WITH_AVX2 static void resample_rows_wide(const uint8_t *const rows[ROWS], uint8_t *const outs[ROWS], const Side *side) {
    if (side->high)
        rows_in_parts(rows, outs, side, 2);
    else
        rows_in_parts(rows, outs, side, 1);
}

WITH_AVX2 static inline __m256i pair_of(const int16_t *coefficients) {
    int32_t both;
    memcpy(&both, coefficients, sizeof both);
    return _mm256_set1_epi32(both);
}

/* Two rows at a time, 32 bytes of each. */
INSIDE Py_ssize_t column_in_parts(const uint8_t *first, Py_ssize_t row, uint8_t *out, const Side *side, Py_ssize_t y,
                                  int parts) {
    const __m256i zero = _mm256_setzero_si256(), half = _mm256_set1_epi32(1 << (side->bits - 1));
    const __m128i bits = _mm_cvtsi32_si128(side->bits);
    const int16_t *low = side->low + y * side->most, *high = parts > 1 ? side->high + y * side->most : NULL;
    const int32_t count = side->count[y];
    Py_ssize_t x = 0;
    for (; x + 32 <= row; x += 32) {
        __m256i sums[4] = {half, half, half, half}, more[4] = {zero, zero, zero, zero};
        const uint8_t *from = first + x;
        for (int32_t i = 0; i < count; i += 2, from += 2 * row) {
            __m256i a = _mm256_loadu_si256((const __m256i *)from); /* the second of an odd number counts nothing */
            __m256i b = i + 1 < count ? _mm256_loadu_si256((const __m256i *)(from + row)) : zero;
            __m256i left = _mm256_unpacklo_epi8(a, b), right = _mm256_unpackhi_epi8(a, b);
            __m256i words[4] = {_mm256_unpacklo_epi8(left, zero), _mm256_unpackhi_epi8(left, zero),
                                _mm256_unpacklo_epi8(right, zero), _mm256_unpackhi_epi8(right, zero)};
            __m256i by = pair_of(low + i);
            for (int j = 0; j < 4; j++)
                sums[j] = _mm256_add_epi32(sums[j], _mm256_madd_epi16(words[j], by));
            if (parts > 1) {
                by = pair_of(high + i);
                for (int j = 0; j < 4; j++)
                    more[j] = _mm256_add_epi32(more[j], _mm256_madd_epi16(words[j], by));
            }
        }
        for (int j = 0; j < 4; j++) {
            if (parts > 1)
                sums[j] = _mm256_add_epi32(sums[j], _mm256_slli_epi32(more[j], LOW_BITS));
            sums[j] = _mm256_sra_epi32(sums[j], bits);
        }
        __m256i made = _mm256_packus_epi16(_mm256_packs_epi32(sums[0], sums[1]), _mm256_packs_epi32(sums[2], sums[3]));
        _mm256_storeu_si256((__m256i *)(out + x), made);
    }
    return x;
}

WITH_AVX2 static Py_ssize_t resample_column_wide(const uint8_t *first, Py_ssize_t row, uint8_t *out, const Side *side,
                                                 Py_ssize_t y) {
    return side->high ? column_in_parts(first, row, out, side, y, 2) : column_in_parts(first, row, out, side, y, 1);
}


#define WITH_AVX512 __attribute__((target("avx512f,avx512bw,avx512vbmi,avx512vnni")))

WITH_AVX512 static inline __m512i repeated(const int8_t *from) { /* each of four outputs' coefficients four times */
    const __m512i fours = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_permutexvar_epi32(fours, _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)from)));
}

WITH_AVX512 static inline __m512i summed(const __m512i sums[PIECES], __m128i bits) {
    __m512i more = _mm512_add_epi32(sums[1], _mm512_slli_epi32(sums[2], 8));
    return _mm512_sra_epi32(_mm512_add_epi32(sums[0], _mm512_slli_epi32(more, 8)), bits);
}

/* Four pixels of four rows at a time, whose inputs lie in the bytes of a register. */
WITH_AVX512 static void resample_rows_widest(const uint8_t *const rows[ROWS], uint8_t *const outs[ROWS],
                                             const Side *side) {
    const __m512i taps = _mm512_set4_epi32(0, 0x0b080502, 0x0a070401, 0x09060300);
    const __m512i fours = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const __m512i turned = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i packed = _mm512_set4_epi32(-1, 0x0e0d0c0a, 0x09080605, 0x04020100);
    const __m512i zero = _mm512_setzero_si512(), half = _mm512_set1_epi32(1 << (side->bits - 1));
    const __m128i bits = _mm_cvtsi32_si128(side->bits);
    const Py_ssize_t piece = side->outputs * side->most;
    for (Py_ssize_t next = 0; next < side->outputs; next += 4) {
        Py_ssize_t x = next + 4 <= side->outputs ? next : side->outputs - 4;
        const int32_t *first = side->first + x;
        __m128i steps = _mm_sub_epi32(_mm_loadu_si128((const __m128i *)first), _mm_set1_epi32(first[0]));
        __m512i places = _mm512_permutexvar_epi32(fours, _mm512_castsi128_si512(steps));
        places = _mm512_add_epi8(taps, _mm512_mullo_epi32(places, _mm512_set1_epi32(0x03030303)));
        __m512i sums[ROWS][PIECES];
        for (int row = 0; row < ROWS; row++)
            sums[row][0] = half, sums[row][1] = sums[row][2] = zero;
        int32_t count = side->count[x];
        for (int i = 1; i < 4; i++)
            count = side->count[x + i] > count ? side->count[x + i] : count;
        for (int32_t i = 0; i < count; i += TAPS) {
            const int8_t *from = side->pieces + i * side->outputs + x * TAPS;
            __m512i by[PIECES] = {repeated(from), repeated(from + piece), repeated(from + 2 * piece)};
            for (int row = 0; row < ROWS; row++) {
                __m512i bytes = _mm512_loadu_si512(rows[row] + ((Py_ssize_t)first[0] + i) * CHANNELS);
                bytes = _mm512_permutexvar_epi8(places, bytes);
                for (int j = 0; j < PIECES; j++)
                    sums[row][j] = _mm512_dpbusd_epi32(sums[row][j], bytes, by[j]);
            }
        }
        __m512i even = _mm512_packs_epi32(summed(sums[0], bits), summed(sums[1], bits));
        __m512i odd = _mm512_packs_epi32(summed(sums[2], bits), summed(sums[3], bits));
        even = _mm512_permutexvar_epi32(turned, _mm512_packus_epi16(even, odd)); /* a row each */
        even = _mm512_shuffle_epi8(even, packed);
        const __m128i made[ROWS] = {_mm512_castsi512_si128(even), _mm512_extracti32x4_epi32(even, 1),
                                    _mm512_extracti32x4_epi32(even, 2), _mm512_extracti32x4_epi32(even, 3)};
        if ((x + 4) * CHANNELS + 4 <= side->outputs * CHANNELS)
            for (int row = 0; row < ROWS; row++) /* the last four bytes are the next pixels' */
                _mm_storeu_si128((__m128i *)(outs[row] + x * CHANNELS), made[row]);
        else
            for (int row = 0; row < ROWS; row++)
                memcpy(outs[row] + x * CHANNELS, &made[row], 4 * CHANNELS);
    }
}

static int narrow(const Side *side) {
    for (Py_ssize_t x = 0; x + 4 <= side->outputs; x++)
        if ((side->first[x + 3] - side->first[x] + TAPS) * CHANNELS > 64)
            return 0;
    return side->outputs >= 4;
}

/* Four rows at a time, 64 bytes of each. */
WITH_AVX512 static void resample_column_widest(const uint8_t *first, Py_ssize_t row, uint8_t *out, const Side *side,
                                               Py_ssize_t y) {
    const __m512i zero = _mm512_setzero_si512(), half = _mm512_set1_epi32(1 << (side->bits - 1));
    const __m128i bits = _mm_cvtsi32_si128(side->bits);
    const Py_ssize_t piece = side->outputs * side->most;
    const int32_t count = side->count[y];
    for (Py_ssize_t x = 0; x < row; x += 64) {
        const __mmask64 there = x + 64 <= row ? ~(__mmask64)0 : ((__mmask64)1 << (row - x)) - 1;
        __m512i sums[4][PIECES];
        for (int k = 0; k < 4; k++)
            sums[k][0] = half, sums[k][1] = sums[k][2] = zero;
        for (int32_t i = 0; i < count; i += TAPS) {
            __m512i four[TAPS];
            for (int k = 0; k < TAPS; k++) /* those behind the last one count nothing */
                four[k] = i + k < count ? _mm512_maskz_loadu_epi8(there, first + (i + k) * row + x) : zero;
            __m512i a = _mm512_unpacklo_epi8(four[0], four[1]), b = _mm512_unpackhi_epi8(four[0], four[1]);
            __m512i c = _mm512_unpacklo_epi8(four[2], four[3]), d = _mm512_unpackhi_epi8(four[2], four[3]);
            const __m512i bytes[4] = {_mm512_unpacklo_epi16(a, c), _mm512_unpackhi_epi16(a, c),
                                      _mm512_unpacklo_epi16(b, d), _mm512_unpackhi_epi16(b, d)};
            const int8_t *from = side->pieces + i * side->outputs + y * TAPS;
            for (int j = 0; j < PIECES; j++) {
                int32_t coefficients;
                memcpy(&coefficients, from + j * piece, sizeof coefficients);
                for (int k = 0; k < 4; k++)
                    sums[k][j] = _mm512_dpbusd_epi32(sums[k][j], bytes[k], _mm512_set1_epi32(coefficients));
            }
        }
        __m512i left = _mm512_packs_epi32(summed(sums[0], bits), summed(sums[1], bits));
        __m512i right = _mm512_packs_epi32(summed(sums[2], bits), summed(sums[3], bits));
        _mm512_mask_storeu_epi8(out + x, there, _mm512_packus_epi16(left, right));
    }
}

/* 0: plain C; 1: AVX2; 2: AVX-512. */
static int widest(void) { return instructions() & AVX512 ? 2 : instructions() & AVX2 ? 1 : 0; }
#else
#define resample_rows_wide resample_rows
static Py_ssize_t resample_column_wide(const uint8_t *first, Py_ssize_t row, uint8_t *out, const Side *side,
                                       Py_ssize_t y) {
    return 0;
}
#define resample_rows_widest resample_rows
#define resample_column_widest(first, row, out, side, y) resample_column(first, row, 0, row, out, side, y)
static int narrow(const Side *side) { return 0; }
static int widest(void) { return 0; }
#endif

static int used = 0; /* of these, the widest that there is, or what a test says */

/* `spare`: memory of a row and two times SPARE, for the last rows: more than a pixel is read at a time. */
static void resample_width(const uint8_t *source, Py_ssize_t height, Py_ssize_t width, uint8_t *out, const Side *side,
                           uint8_t *spare, int wide) {
    Py_ssize_t row = width * CHANNELS, out_row = side->outputs * CHANNELS;
    const uint8_t *rows[ROWS];
    uint8_t *outs[ROWS];
    void (*resample)(const uint8_t *const *, uint8_t *const *, const Side *) =
        wide > 1 && narrow(side) ? resample_rows_widest : wide ? resample_rows_wide : resample_rows;
    Py_ssize_t tail = SPARE / row + 1, body = tail < height ? height - tail : 0; /* rows that end too near the end */
    memcpy(spare, source + body * row, (height - body) * row);
    memset(spare + (height - body) * row, 0, SPARE);
    for (Py_ssize_t y = 0; y < height; y += ROWS) {
        for (Py_ssize_t i = 0; i < ROWS; i++) { /* the last row several times where there are not as many left */
            Py_ssize_t number = y + i < height ? y + i : height - 1;
            rows[i] = number < body ? source + number * row : spare + (number - body) * row;
            outs[i] = out + number * out_row;
        }
        resample(rows, outs, side);
    }
}

static void resample_height(const uint8_t *source, Py_ssize_t row, uint8_t *out, const Side *side, int wide) {
    for (Py_ssize_t y = 0; y < side->outputs; y++, out += row) {
        const uint8_t *first = source + (Py_ssize_t)side->first[y] * row;
        if (wide > 1) {
            resample_column_widest(first, row, out, side, y);
            continue;
        }
        Py_ssize_t done = wide ? resample_column_wide(first, row, out, side, y) : 0;
        resample_column(first, row, done, row, out, side, y);
    }
}

static int side_of(const Py_buffer *where, const Py_buffer *coefficients, Py_ssize_t parts, Py_ssize_t bits,
                   Py_ssize_t inputs, Side *side) {
    Py_ssize_t outputs = where->len / (2 * (Py_ssize_t)sizeof(int32_t));
    Py_ssize_t item = parts * (Py_ssize_t)sizeof(int16_t) + PIECES;
    if (outputs == 0 || parts < 1 || parts > 2 || bits < 1 || bits > 22 || coefficients->len % (outputs * item))
        return 0;
    side->outputs = outputs;
    side->most = coefficients->len / (outputs * item);
    side->bits = (int)bits;
    if (side->most % TAPS)
        return 0;
    side->first = where->buf;
    side->count = side->first + outputs;
    side->low = coefficients->buf;
    side->high = parts > 1 ? side->low + outputs * side->most : NULL;
    side->pieces = (const int8_t *)(side->low + parts * outputs * side->most);
    for (Py_ssize_t i = 0; i < outputs; i++)
        if (side->first[i] < 0 || side->count[i] < 0 || side->count[i] > side->most ||
            side->first[i] + (Py_ssize_t)side->count[i] > inputs)
            return 0;
    return 1;
}

static int buffers_of(PyObject *const *args, Py_buffer *buffers, int count, unsigned writable) {
    for (int i = 0; i < count; i++)
        if (PyObject_GetBuffer(args[i], &buffers[i], writable >> i & 1 ? PyBUF_WRITABLE : PyBUF_SIMPLE)) {
            while (i--)
                PyBuffer_Release(&buffers[i]);
            return 0;
        }
    return 1;
}

/* resample(source, height, width, out, scratch, where_x, coefficients_x, where_y, coefficients_y, parts, bits_x,
   bits_y) */
static PyObject *resample(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    Py_ssize_t n[5];
    if (nargs != 12)
        return PyErr_Format(PyExc_TypeError, "expected 12 arguments, got %zd", nargs);
    for (int i = 0; i < 5; i++)
        n[i] = PyLong_AsSsize_t(args[i < 2 ? 1 + i : 7 + i]);
    if (PyErr_Occurred())
        return NULL;
    Py_ssize_t height = n[0], width = n[1];
    PyObject *const given[] = {args[0], args[3], args[4], args[5], args[6], args[7], args[8]};
    Py_buffer b[7];
    if (!buffers_of(given, b, 7, 6))
        return NULL;
    Side across, down;
    int fits = height > 0 && width > 0 && b[0].len / height / width == CHANNELS && b[0].len == height * width * CHANNELS &&
               side_of(&b[3], &b[4], n[2], n[3], width, &across) &&
               side_of(&b[5], &b[6], n[2], n[4], height, &down) &&
               b[1].len == across.outputs * down.outputs * CHANNELS;
    int wider = fits && across.outputs != width, higher = fits && down.outputs != height;
    Py_ssize_t between = wider && higher ? height * across.outputs * CHANNELS : 0;
    fits = fits && (wider || higher) && b[2].len >= between + width * CHANNELS + 2 * SPARE;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        uint8_t *scratch = b[2].buf;
        const uint8_t *source = b[0].buf;
        if (wider) {
            uint8_t *made = higher ? scratch : b[1].buf;
            resample_width(source, height, width, made, &across, scratch + between, used);
            source = made;
        }
        if (higher)
            resample_height(source, across.outputs * CHANNELS, b[1].buf, &down, used);
        Py_END_ALLOW_THREADS
    } else
        PyErr_SetString(PyExc_ValueError, "the arrays do not fit each other");
    for (int i = 0; i < 7; i++)
        PyBuffer_Release(&b[i]);
    return fits ? Py_NewRef(Py_None) : NULL;
}

/* Where the values of an image go: patches of `height` x `width` pixels, `merge` x `merge` of them next to each other,
   each channel by channel, and each channel for every one of `times` frames. */
typedef struct {
    Py_ssize_t rows, columns; /* of patches */
    Py_ssize_t height, width, merge, times;
    Py_ssize_t row, frame; /* bytes from one row of pixels, and from one frame, to the next; frame 0: one for all */
} Layout;

#define LOOK_UP(TYPE)                                                                                                  \
    static void look_up_##TYPE(const uint8_t *source, TYPE *out, const TYPE *table, const Layout *l) {                 \
        const Py_ssize_t plane = l->height * l->width, m = l->merge;                                                   \
        for (Py_ssize_t patch = 0; patch < l->rows * l->columns; patch++, out += CHANNELS * l->times * plane) {        \
            Py_ssize_t group = patch / (m * m), inside = patch % (m * m);                                              \
            Py_ssize_t y = group / (l->columns / m) * m + inside / m, x = group % (l->columns / m) * m + inside % m;   \
            const uint8_t *corner = source + y * l->height * l->row + x * l->width * CHANNELS;                         \
            for (Py_ssize_t time = 0; time < (l->frame ? l->times : 1); time++) {                                      \
                TYPE *red = out + time * plane, *green = red + l->times * plane, *blue = green + l->times * plane;     \
                for (Py_ssize_t i = 0; i < l->height; i++) {                                                           \
                    const uint8_t *pixels = corner + time * l->frame + i * l->row;                                     \
                    for (Py_ssize_t j = 0; j < l->width; j++, pixels += CHANNELS) {                                    \
                        *red++ = table[pixels[0]];                                                                     \
                        *green++ = table[256 + pixels[1]];                                                             \
                        *blue++ = table[512 + pixels[2]];                                                              \
                    }                                                                                                  \
                }                                                                                                      \
            }                                                                                                          \
            for (int channel = 0; !l->frame && channel < CHANNELS; channel++)                                          \
                for (Py_ssize_t time = 1; time < l->times; time++)                                                     \
                    memcpy(out + (channel * l->times + time) * plane, out + channel * l->times * plane,                \
                           plane * sizeof(TYPE));                                                                      \
        }                                                                                                              \
    }

LOOK_UP(uint8_t)
LOOK_UP(uint16_t)
LOOK_UP(uint32_t)

#define LOOK_UP_PIXELS(TYPE)                                                                                           \
    static void look_up_pixels_##TYPE(const uint8_t *source, TYPE *out, const TYPE *table, const Layout *l) {          \
        const Py_ssize_t m = l->merge;                                                                                 \
        for (Py_ssize_t patch = 0; patch < l->rows * l->columns; patch++) {                                            \
            Py_ssize_t group = patch / (m * m), inside = patch % (m * m);                                              \
            Py_ssize_t y = group / (l->columns / m) * m + inside / m, x = group % (l->columns / m) * m + inside % m;   \
            const uint8_t *pixels = source + y * l->height * l->row + x * l->width * CHANNELS;                         \
            for (Py_ssize_t i = 0; i < l->height; i++, pixels += l->row)                                               \
                for (Py_ssize_t j = 0; j < l->width * CHANNELS; j += CHANNELS, out += CHANNELS) {                      \
                    out[0] = table[pixels[j]];                                                                         \
                    out[1] = table[256 + pixels[j + 1]];                                                               \
                    out[2] = table[512 + pixels[j + 2]];                                                               \
                }                                                                                                      \
        }                                                                                                              \
    }

LOOK_UP_PIXELS(uint8_t)
LOOK_UP_PIXELS(uint16_t)
LOOK_UP_PIXELS(uint32_t)

#define LARGE (1 << 21) /* bytes from which on writing past the caches is faster */

static int identical(const uint8_t *table) {
    for (int i = 0; i < 256 * CHANNELS; i++)
        if (table[i] != i % 256)
            return 0;
    return 1;
}

#if WIDE
#define MOST 4096 /* pixels of a block: a patch, or a row of a larger image */

INSIDE void apart_16(const uint8_t *from, uint8_t *red, uint8_t *green, uint8_t *blue) {
    const __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)(from + 16)),
                  c = _mm_loadu_si128((const __m128i *)(from + 32));
#define PICK(A, B, C) _mm_or_si128(_mm_or_si128(_mm_shuffle_epi8(a, A), _mm_shuffle_epi8(b, B)), _mm_shuffle_epi8(c, C))
    const __m128i r = PICK(_mm_setr_epi8(0, 3, 6, 9, 12, 15, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1),
                           _mm_setr_epi8(-1, -1, -1, -1, -1, -1, 2, 5, 8, 11, 14, -1, -1, -1, -1, -1),
                           _mm_setr_epi8(-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 1, 4, 7, 10, 13));
    const __m128i g = PICK(_mm_setr_epi8(1, 4, 7, 10, 13, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1),
                           _mm_setr_epi8(-1, -1, -1, -1, -1, 0, 3, 6, 9, 12, 15, -1, -1, -1, -1, -1),
                           _mm_setr_epi8(-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 2, 5, 8, 11, 14));
    const __m128i l = PICK(_mm_setr_epi8(2, 5, 8, 11, 14, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1),
                           _mm_setr_epi8(-1, -1, -1, -1, -1, 1, 4, 7, 10, 13, -1, -1, -1, -1, -1, -1),
                           _mm_setr_epi8(-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 3, 6, 9, 12, 15));
#undef PICK
    _mm_storeu_si128((__m128i *)red, r);
    _mm_storeu_si128((__m128i *)green, g);
    _mm_storeu_si128((__m128i *)blue, l);
}

/* The values of 64 bytes at a time, up to 63 more than were asked for: a register holds a quarter of the table of one of
   their bytes. */
#define INSIDE_512 WITH_AVX512 __attribute__((always_inline)) static inline
INSIDE_512 void values_widest(const uint8_t *from, uint8_t *to, const uint8_t *table, Py_ssize_t count, int item) {
    const __m512i order = item == 4 ? _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)
                                    : _mm512_setr_epi32(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    __m512i tables[4][4];
    for (int byte = 0; byte < item; byte++)
        for (int k = 0; k < 4; k++)
            tables[byte][k] = _mm512_loadu_si512(table + 256 * byte + 64 * k);
    for (Py_ssize_t i = 0; i < count; i += 64, to += 64 * item) {
        const __m512i index = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(from + i));
        const __mmask64 upper = _mm512_movepi8_mask(index);
        __m512i made[4];
        for (int byte = 0; byte < item; byte++)
            made[byte] = _mm512_mask_blend_epi8(
                upper, _mm512_permutex2var_epi8(tables[byte][0], index, tables[byte][1]),
                _mm512_permutex2var_epi8(tables[byte][2], index, tables[byte][3]));
        __m512i a = _mm512_unpacklo_epi8(made[0], made[1]), b = _mm512_unpackhi_epi8(made[0], made[1]);
        if (item == 4) {
            __m512i c = _mm512_unpacklo_epi8(made[2], made[3]), d = _mm512_unpackhi_epi8(made[2], made[3]);
            _mm512_storeu_si512(to, _mm512_unpacklo_epi16(a, c));
            _mm512_storeu_si512(to + 64, _mm512_unpackhi_epi16(a, c));
            _mm512_storeu_si512(to + 128, _mm512_unpacklo_epi16(b, d));
            _mm512_storeu_si512(to + 192, _mm512_unpackhi_epi16(b, d));
        } else {
            _mm512_storeu_si512(to, a);
            _mm512_storeu_si512(to + 64, b);
        }
    }
}

WITH_AVX512 static void values_16(const uint8_t *from, void *to, const uint8_t *table, Py_ssize_t count) {
    values_widest(from, to, table, count, 2);
}

WITH_AVX512 static void values_32(const uint8_t *from, void *to, const uint8_t *table, Py_ssize_t count) {
    values_widest(from, to, table, count, 4);
}

#define VALUES(TYPE)                                                                                                   \
    static inline void values_##TYPE(const uint8_t *restrict from, TYPE *restrict to, const TYPE *restrict table,      \
                                     Py_ssize_t count) {                                                               \
        Py_ssize_t i = 0;                                                                                              \
        for (; i + 8 <= count; i += 8) {                                                                               \
            uint64_t eight;                                                                                            \
            memcpy(&eight, from + i, 8);                                                                               \
            for (int k = 0; k < 8; k++)                                                                                \
                to[i + k] = table[eight >> 8 * k & 255];                                                               \
        }                                                                                                              \
        for (; i < count; i++)                                                                                         \
            to[i] = table[from[i]];                                                                                    \
    }

VALUES(uint16_t)
VALUES(uint32_t)

/* The values of 16 bytes at a time, up to 15 more than were asked for, where they are bfloat16 on a line: computed in
   float32 and rounded, which takes a third of the time. `stream`: past the caches. */
INSIDE void values_on_line(const uint8_t *from, uint16_t *to, const float line[2], Py_ssize_t count, int stream) {
    const __m256 slope = _mm256_set1_ps(line[0]), start = _mm256_set1_ps(line[1]);
    const __m256i half = _mm256_set1_epi32(0x8000), even = _mm256_set1_epi32(0xffff);
    for (Py_ssize_t i = 0; i < count; i += 16) {
        __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(from + i)));
        __m256 a = _mm256_cvtepi32_ps(_mm256_and_si256(words, even)), b = _mm256_cvtepi32_ps(_mm256_srli_epi32(words, 16));
        a = _mm256_add_ps(_mm256_mul_ps(a, slope), start), b = _mm256_add_ps(_mm256_mul_ps(b, slope), start);
        __m256i low = _mm256_srli_epi32(_mm256_add_epi32(_mm256_castps_si256(a), half), 16);
        __m256i made = _mm256_blend_epi16(low, _mm256_add_epi32(_mm256_castps_si256(b), half), 0xaa);
        if (stream)
            _mm256_stream_si256((__m256i *)(to + i), made);
        else
            _mm256_storeu_si256((__m256i *)(to + i), made);
    }
}

/* Whether the lines give all values of a table: only then are they taken. */
WITH_AVX2 static int on_lines(const uint16_t *table, const float *lines) {
    uint8_t bytes[256];
    uint16_t values[256];
    for (int i = 0; i < 256; i++)
        bytes[i] = (uint8_t)i;
    for (int channel = 0; channel < CHANNELS; channel++) {
        values_on_line(bytes, values, lines + 2 * channel, 256, 0);
        if (memcmp(values, table + 256 * channel, sizeof values))
            return 0;
    }
    return 1;
}

/* Copy, past the caches where what is written is large. `loose`: what is behind it is written later. */
INSIDE void write_out(const void *from, void *to, Py_ssize_t bytes, int stream, int loose) {
    if (stream && (uintptr_t)to % 16 == 0 && bytes % 16 == 0)
        for (Py_ssize_t i = 0; i < bytes; i += 16)
            _mm_stream_si128((__m128i *)((char *)to + i), _mm_loadu_si128((const __m128i *)((const char *)from + i)));
    else if (loose)
        for (Py_ssize_t i = 0; i < bytes; i += 16)
            _mm_storeu_si128((__m128i *)((char *)to + i), _mm_loadu_si128((const __m128i *)((const char *)from + i)));
    else
        memcpy(to, from, bytes);
}

/* As look_up, block by block: the bytes of each channel next to each other, then their values, then where they go. */
WITH_AVX2 static void look_up_wide(const uint8_t *source, const uint8_t *end, char *out, const char *table,
                                   const float *lines, const Layout *l, Py_ssize_t item, int stream) {
    uint8_t bytes[CHANNELS][MOST + 64], planes[CHANNELS][4][256]; /* the table's values byte by byte */
    uint32_t values[MOST + 64];
    for (int at = 0; used > 1 && at < CHANNELS * 256 * item; at++)
        planes[at / item / 256][at % item][at / item % 256] = ((const uint8_t *)table)[at];
    const Py_ssize_t patches = l->rows * l->columns;
    const Py_ssize_t plane = l->height * l->width, m = l->merge, high = plane > MOST ? 1 : l->height;
    const Py_ssize_t block = high * l->width, frames = l->frame ? l->times : 1, copies = l->times / frames;
    for (Py_ssize_t patch = 0; patch < patches; patch++, out += CHANNELS * l->times * plane * item) {
        Py_ssize_t group = patch / (m * m), inside = patch % (m * m);
        Py_ssize_t y = group / (l->columns / m) * m + inside / m, x = group % (l->columns / m) * m + inside % m;
        const uint8_t *corner = source + y * l->height * l->row + x * l->width * CHANNELS;
        int loose = item < 4 && frames == 1 && high == l->height && patch + 1 < patches;
        for (Py_ssize_t part = 0; part < frames * (l->height / high); part++) {
            Py_ssize_t time = part / (l->height / high), top = part % (l->height / high) * high;
            for (Py_ssize_t i = 0; i < high; i++) {
                const uint8_t *pixels = corner + time * l->frame + (top + i) * l->row;
                for (Py_ssize_t j = 0; j < l->width; j += 16, pixels += 16 * CHANNELS) {
                    Py_ssize_t at = i * l->width + j; /* what is too much is overwritten, or behind the block */
                    if (pixels + 16 * CHANNELS <= end)
                        apart_16(pixels, bytes[0] + at, bytes[1] + at, bytes[2] + at);
                    else
                        for (Py_ssize_t k = 0; k < l->width - j && k < 16; k++)
                            for (int channel = 0; channel < CHANNELS; channel++)
                                bytes[channel][at + k] = pixels[k * CHANNELS + channel];
                }
            }
            for (int channel = 0; channel < CHANNELS; channel++) {
                char *to = out + ((channel * l->times + time) * plane + top * l->width) * item;
                const void *made = bytes[channel];
                if (item > 1) {
                    void *here = copies == 1 && !stream && used < 2 ? (void *)to : values;
                    const int fits = copies == 1 && block % 16 == 0, past = fits && stream && (uintptr_t)to % 32 == 0;
                    if (lines)
                        here = past || (fits && !stream) ? (void *)to : values;
                    if (lines && past)
                        values_on_line(bytes[channel], here, lines + 2 * channel, block, 1);
                    else if (lines)
                        values_on_line(bytes[channel], here, lines + 2 * channel, block, 0);
                    else if (used > 1)
                        (item == 2 ? values_16 : values_32)(bytes[channel], here, planes[channel][0], block);
                    else if (item == 2)
                        values_uint16_t(bytes[channel], here, (const uint16_t *)table + 256 * channel, block);
                    else
                        values_uint32_t(bytes[channel], here, (const uint32_t *)table + 256 * channel, block);
                    if (here == to)
                        continue;
                    made = values;
                }
                for (Py_ssize_t copy = 0; copy < copies; copy++)
                    write_out(made, to + copy * plane * item, block * item, stream, loose);
            }
        }
    }
    if (stream)
        _mm_sfence(); /* before anybody is told that it is there */
}
#else
#define MOST 0
static void look_up_wide(const uint8_t *source, const uint8_t *end, char *out, const char *table, const float *lines,
                         const Layout *l, Py_ssize_t item, int stream) {}
static int on_lines(const uint16_t *table, const float *lines) { return 0; }
#endif

/* look_up(pixels, out, table, frames, height, width, patch height, patch width, merge, times, pixel by pixel, lines)

   `lines`: of each channel, slope and start of a line that its values may lie on, float32; or nothing. */
static PyObject *look_up(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    Py_ssize_t n[7];
    if (nargs != 12)
        return PyErr_Format(PyExc_TypeError, "expected 12 arguments, got %zd", nargs);
    int by_pixel = PyObject_IsTrue(args[10]);
    if (by_pixel < 0)
        return NULL;
    for (int i = 0; i < 7; i++)
        if ((n[i] = PyLong_AsSsize_t(args[3 + i])) < 1)
            return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "argument %d must be positive", 4 + i);
    Py_ssize_t frames = n[0], height = n[1], width = n[2];
    PyObject *const given[] = {args[0], args[1], args[2], args[11]};
    Py_buffer b[4];
    if (!buffers_of(given, b, 4, 2))
        return NULL;
    Py_ssize_t item = b[2].len / (256 * CHANNELS), size = b[0].len / frames;
    Layout l = {.rows = height / n[3], .columns = width / n[4], .height = n[3], .width = n[4], .merge = n[5],
                .times = n[6], .row = width * CHANNELS, .frame = frames > 1 ? size : 0};
    int fits = height % n[3] == 0 && width % n[4] == 0 && l.rows % l.merge == 0 && l.columns % l.merge == 0 &&
               (frames == 1 || frames == l.times) && size / l.row == height && size % l.row == 0 &&
               size * frames == b[0].len && b[2].len == item * 256 * CHANNELS &&
               (item == 1 || item == 2 || item == 4) && (uintptr_t)b[1].buf % item == 0 &&
               b[1].len / item / l.times == height * width * CHANNELS && b[1].len % (item * l.times) == 0 &&
               (!by_pixel || l.times == 1) && (b[3].len == 0 || b[3].len == 2 * CHANNELS * sizeof(float));
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        const uint8_t *source = b[0].buf;
        if (by_pixel && item == 1)
            look_up_pixels_uint8_t(source, b[1].buf, b[2].buf, &l);
        else if (by_pixel && item == 2)
            look_up_pixels_uint16_t(source, b[1].buf, b[2].buf, &l);
        else if (by_pixel)
            look_up_pixels_uint32_t(source, b[1].buf, b[2].buf, &l);
        else if (used && l.width <= MOST && (item > 1 || identical(b[2].buf)))
            look_up_wide(source, source + b[0].len, b[1].buf, b[2].buf,
                         used < 2 && item == 2 && b[3].len && on_lines(b[2].buf, b[3].buf) ? b[3].buf : NULL, &l, item,
                         b[1].len >= LARGE);
        else if (item == 1)
            look_up_uint8_t(source, b[1].buf, b[2].buf, &l);
        else if (item == 2)
            look_up_uint16_t(source, b[1].buf, b[2].buf, &l);
        else
            look_up_uint32_t(source, b[1].buf, b[2].buf, &l);
        Py_END_ALLOW_THREADS
    } else
        PyErr_SetString(PyExc_ValueError, "the arrays do not fit each other");
    for (int i = 0; i < 4; i++)
        PyBuffer_Release(&b[i]);
    return fits ? Py_NewRef(Py_None) : NULL;
}

/* Writing to memory past the caches: see streaming.py.

   An ordinary store first reads the line that it is about to overwrite, and what is written drives everything else
   out of the caches. Streaming stores do neither. They pay for memory that is larger than the caches and that nobody
   reads soon, which is what the batches under way to a trainer are. Only a processor with AVX2 has these two. */
#if WIDE
#define LINE 32 /* bytes of a register, at a multiple of which its streaming store has to begin */

typedef void (*Kernel)(const uint8_t *source, void *out, Py_ssize_t bytes);

WITH_AVX2 static void divide_pixels(const uint8_t *source, void *out, Py_ssize_t bytes) {
    const __m256 full = _mm256_set1_ps(255.0f);
    float *to = out;
    Py_ssize_t i = 0;
    for (; i < bytes && (uintptr_t)(to + i) % LINE; i++)
        to[i] = (float)source[i] / 255.0f;
    for (; i + 8 <= bytes; i += 8) {
        __m256i pixels = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(source + i)));
        _mm256_stream_ps(to + i, _mm256_div_ps(_mm256_cvtepi32_ps(pixels), full));
    }
    for (; i < bytes; i++)
        to[i] = (float)source[i] / 255.0f;
    _mm_sfence(); /* before anybody is told that it is there */
}

WITH_AVX2 static void copy_bytes(const uint8_t *source, void *out, Py_ssize_t bytes) {
    uint8_t *to = out;
    Py_ssize_t i = 0;
    for (; i < bytes && (uintptr_t)(to + i) % LINE; i++)
        to[i] = source[i];
    for (; i + 2 * LINE <= bytes; i += 2 * LINE) {
        __m256i first = _mm256_loadu_si256((const __m256i *)(source + i));
        __m256i second = _mm256_loadu_si256((const __m256i *)(source + i + LINE));
        _mm256_stream_si256((__m256i *)(to + i), first);
        _mm256_stream_si256((__m256i *)(to + i + LINE), second);
    }
    for (; i < bytes; i++)
        to[i] = source[i];
    _mm_sfence();
}

/* Run a kernel from the first of two buffers to the second: as many items, of so many bytes (0: any, both the same). */
static PyObject *pass_on(PyObject *const *args, Py_ssize_t nargs, Py_ssize_t from, Py_ssize_t to, Kernel kernel) {
    Py_buffer source, out;
    if (nargs != 2)
        return PyErr_Format(PyExc_TypeError, "expected what is read and what is written, got %zd arguments", nargs);
    if (PyObject_GetBuffer(args[0], &source, PyBUF_SIMPLE))
        return NULL;
    if (PyObject_GetBuffer(args[1], &out, PyBUF_WRITABLE)) {
        PyBuffer_Release(&source);
        return NULL;
    }
    if (from == 0)
        from = to = source.itemsize;
    int fits = source.itemsize == from && out.itemsize == to && out.len / to == source.len / from &&
               (from == to || (uintptr_t)out.buf % to == 0);
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        kernel(source.buf, out.buf, source.len);
        Py_END_ALLOW_THREADS
    } else
        PyErr_Format(PyExc_ValueError, "%zd bytes of items of %zd bytes do not fit %zd bytes of items of %zd bytes",
                     source.len, source.itemsize, out.len, out.itemsize);
    PyBuffer_Release(&source);
    PyBuffer_Release(&out);
    return fits ? Py_NewRef(Py_None) : NULL;
}

static PyObject *divide(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    return pass_on(args, nargs, 1, sizeof(float), divide_pixels);
}

static PyObject *copy(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    return pass_on(args, nargs, 0, 0, copy_bytes);
}

static PyMethodDef PAST_THE_CACHES[] = {
    {"divide", (PyCFunction)(void (*)(void))divide, METH_FASTCALL, "Write pixels, divided by 255, to float32 memory."},
    {"copy", (PyCFunction)(void (*)(void))copy, METH_FASTCALL, "Copy numbers of any one type."},
    {NULL, NULL, 0, NULL},
};
#else
static PyMethodDef PAST_THE_CACHES[] = {{NULL, NULL, 0, NULL}};
#endif

/* use(width): what is computed with, 0 to what there is, which is returned; for tests. */
static PyObject *use(PyObject *module, PyObject *width) {
    long wanted = PyLong_AsLong(width);
    if (PyErr_Occurred())
        return NULL;
    used = wanted < 0 ? 0 : wanted > widest() ? widest() : (int)wanted;
    return PyLong_FromLong(widest());
}

static int execute(PyObject *module) {
    used = widest();
    if (PyModule_AddIntConstant(module, "LINES", 1)) /* tells an extension that was built of an older source */
        return -1;
    return used ? PyModule_AddFunctions(module, PAST_THE_CACHES) : 0;
}

static PyMethodDef METHODS[] = {
    {"use", use, METH_O, "Choose the instructions."},
    {"resample", (PyCFunction)(void (*)(void))resample, METH_FASTCALL, "Resize an image as Pillow or torch does."},
    {"look_up", (PyCFunction)(void (*)(void))look_up, METH_FASTCALL, "Write values of bytes in a layout."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot SLOTS[] = {{Py_mod_exec, (void *)execute}, {0, NULL}};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_pixels", "Pixels for models.", 0, METHODS, SLOTS, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__pixels(void) { return PyModuleDef_Init(&MODULE); }
