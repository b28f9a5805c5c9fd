/* Pixels for models: Pillow's resampling, and bytes to values in the layout of a model. See pixels.py.

   Both release the interpreter lock, and give the same values on every processor: the first is integer arithmetic, the
   second looks values up. With AVX2, eight sums are made at a time; a compiler does not find that by itself. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define WIDE 1 /* where the processor has AVX2 */
#else
#define WIDE 0
#endif

#define CHANNELS 3
#define BITS 22 /* of the fraction of a coefficient, as in Pillow */
#define ROWS 4  /* that are resampled side by side */
#define SPARE 8 /* bytes behind a row that may be read with its last pixel */

static inline uint8_t clipped(int32_t sum) {
    sum >>= BITS;
    return sum < 0 ? 0 : sum > 255 ? 255 : (uint8_t)sum;
}

/* How each output along one side is made: of which inputs, and with which coefficients. */
typedef struct {
    Py_ssize_t outputs, most;    /* most: coefficients that each output has room for */
    const int32_t *first, *count; /* of each output */
    const int32_t *coefficients;
} Side;

static void resample_rows(const uint8_t *const rows[ROWS], uint8_t *const outs[ROWS], const Side *side) {
    for (int row = 0; row < ROWS; row++)
        for (Py_ssize_t x = 0; x < side->outputs; x++) {
            const int32_t *k = side->coefficients + x * side->most;
            const uint8_t *from = rows[row] + (Py_ssize_t)side->first[x] * CHANNELS;
            int32_t red = 1 << (BITS - 1), green = red, blue = red;
            for (int32_t i = 0; i < side->count[x]; i++, from += CHANNELS) {
                red += k[i] * from[0];
                green += k[i] * from[1];
                blue += k[i] * from[2];
            }
            uint8_t *to = outs[row] + x * CHANNELS;
            to[0] = clipped(red), to[1] = clipped(green), to[2] = clipped(blue);
        }
}

static void resample_column(const uint8_t *first, Py_ssize_t row, Py_ssize_t from, Py_ssize_t to, uint8_t *out,
                            const int32_t *k, int32_t count) {
    for (Py_ssize_t x = from; x < to; x++) {
        int32_t sum = 1 << (BITS - 1);
        for (int32_t i = 0; i < count; i++)
            sum += k[i] * first[i * row + x];
        out[x] = clipped(sum);
    }
}

#if WIDE
#define WITH_AVX2 __attribute__((target("avx2")))

/* Two pixels at a time: of an odd number, the last coefficient is 0. */
WITH_AVX2 static void resample_rows_wide(const uint8_t *const rows[ROWS], uint8_t *const outs[ROWS], const Side *side) {
    const __m128i apart = _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m256i both = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
    const __m256i half = _mm256_setr_epi32(1 << (BITS - 1), 1 << (BITS - 1), 1 << (BITS - 1), 0, 0, 0, 0, 0);
    for (Py_ssize_t x = 0; x < side->outputs; x++) {
        const int32_t *k = side->coefficients + x * side->most;
        Py_ssize_t at = (Py_ssize_t)side->first[x] * CHANNELS;
        __m256i sums[ROWS] = {half, half, half, half};
        for (int32_t i = 0; i < side->count[x]; i += 2, at += 2 * CHANNELS) {
            __m256i by = _mm256_castsi128_si256(_mm_loadl_epi64((const __m128i *)(k + i)));
            by = _mm256_permutevar8x32_epi32(by, both);
            for (int row = 0; row < ROWS; row++) {
                __m128i bytes = _mm_shuffle_epi8(_mm_loadl_epi64((const __m128i *)(rows[row] + at)), apart);
                sums[row] = _mm256_add_epi32(sums[row], _mm256_mullo_epi32(_mm256_cvtepu8_epi32(bytes), by));
            }
        }
        for (int row = 0; row < ROWS; row++) {
            __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(sums[row]), _mm256_extracti128_si256(sums[row], 1));
            sum = _mm_srai_epi32(sum, BITS);
            sum = _mm_packus_epi16(_mm_packs_epi32(sum, sum), sum);
            uint32_t pixel = (uint32_t)_mm_cvtsi128_si32(sum);
            memcpy(outs[row] + x * CHANNELS, &pixel, x + 1 < side->outputs ? 4 : CHANNELS);
        }
    }
}

WITH_AVX2 static inline __m256i eight(const uint8_t *from) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
}

WITH_AVX2 static Py_ssize_t resample_column_wide(const uint8_t *first, Py_ssize_t row, uint8_t *out, const int32_t *k,
                                                 int32_t count) {
    const __m256i half = _mm256_set1_epi32(1 << (BITS - 1));
    Py_ssize_t x = 0;
    for (; x + 32 <= row; x += 32) {
        __m256i a = half, b = half, c = half, d = half;
        const uint8_t *from = first + x;
        for (int32_t i = 0; i < count; i++, from += row) {
            __m256i by = _mm256_set1_epi32(k[i]);
            a = _mm256_add_epi32(a, _mm256_mullo_epi32(eight(from), by));
            b = _mm256_add_epi32(b, _mm256_mullo_epi32(eight(from + 8), by));
            c = _mm256_add_epi32(c, _mm256_mullo_epi32(eight(from + 16), by));
            d = _mm256_add_epi32(d, _mm256_mullo_epi32(eight(from + 24), by));
        }
        a = _mm256_packs_epi32(_mm256_srai_epi32(a, BITS), _mm256_srai_epi32(b, BITS));
        c = _mm256_packs_epi32(_mm256_srai_epi32(c, BITS), _mm256_srai_epi32(d, BITS));
        a = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(a, c), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256((__m256i *)(out + x), a);
    }
    return x;
}

static int wide_enough(void) { return __builtin_cpu_supports("avx2"); }
#else
#define resample_rows_wide resample_rows
static Py_ssize_t resample_column_wide(const uint8_t *first, Py_ssize_t row, uint8_t *out, const int32_t *k,
                                       int32_t count) {
    return 0;
}
static int wide_enough(void) { return 0; }
#endif

/* `spare`: memory of a row and two times SPARE, for the last rows: more than a pixel is read at a time. */
static void resample_width(const uint8_t *source, Py_ssize_t height, Py_ssize_t width, uint8_t *out, const Side *side,
                           uint8_t *spare, int wide) {
    Py_ssize_t row = width * CHANNELS, out_row = side->outputs * CHANNELS;
    const uint8_t *rows[ROWS];
    uint8_t *outs[ROWS];
    Py_ssize_t tail = SPARE / row + 1, body = tail < height ? height - tail : 0; /* rows that end too near the end */
    memcpy(spare, source + body * row, (height - body) * row);
    memset(spare + (height - body) * row, 0, SPARE);
    for (Py_ssize_t y = 0; y < height; y += ROWS) {
        for (Py_ssize_t i = 0; i < ROWS; i++) { /* the last row several times where there are not as many left */
            Py_ssize_t number = y + i < height ? y + i : height - 1;
            rows[i] = number < body ? source + number * row : spare + (number - body) * row;
            outs[i] = out + number * out_row;
        }
        (wide ? resample_rows_wide : resample_rows)(rows, outs, side);
    }
}

static void resample_height(const uint8_t *source, Py_ssize_t row, uint8_t *out, const Side *side, int wide) {
    for (Py_ssize_t y = 0; y < side->outputs; y++, out += row) {
        const int32_t *k = side->coefficients + y * side->most;
        const uint8_t *first = source + (Py_ssize_t)side->first[y] * row;
        Py_ssize_t done = wide ? resample_column_wide(first, row, out, k, side->count[y]) : 0;
        resample_column(first, row, done, row, out, k, side->count[y]);
    }
}

static int side_of(const Py_buffer *where, const Py_buffer *coefficients, Py_ssize_t inputs, Side *side) {
    Py_ssize_t outputs = where->len / (2 * (Py_ssize_t)sizeof(int32_t));
    if (outputs == 0 || coefficients->len % (outputs * (Py_ssize_t)sizeof(int32_t)))
        return 0;
    side->outputs = outputs;
    side->most = coefficients->len / (outputs * (Py_ssize_t)sizeof(int32_t));
    if (side->most % 2) /* they are read in pairs */
        return 0;
    side->first = where->buf;
    side->count = side->first + outputs;
    side->coefficients = coefficients->buf;
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

/* resample(source, height, width, out, scratch, where_x, coefficients_x, where_y, coefficients_y) */
static PyObject *resample(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 9)
        return PyErr_Format(PyExc_TypeError, "expected 9 arguments, got %zd", nargs);
    Py_ssize_t height = PyLong_AsSsize_t(args[1]), width = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred())
        return NULL;
    PyObject *const given[] = {args[0], args[3], args[4], args[5], args[6], args[7], args[8]};
    Py_buffer b[7];
    if (!buffers_of(given, b, 7, 6))
        return NULL;
    Side across, down;
    int fits = height > 0 && width > 0 && b[0].len / height / width == CHANNELS && b[0].len == height * width * CHANNELS &&
               side_of(&b[3], &b[4], width, &across) && side_of(&b[5], &b[6], height, &down) &&
               b[1].len == across.outputs * down.outputs * CHANNELS;
    int wider = fits && across.outputs != width, higher = fits && down.outputs != height;
    Py_ssize_t between = wider && higher ? height * across.outputs * CHANNELS : 0;
    fits = fits && (wider || higher) && b[2].len >= between + width * CHANNELS + 2 * SPARE;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        uint8_t *scratch = b[2].buf;
        const uint8_t *source = b[0].buf;
        int avx2 = wide_enough();
        if (wider) {
            uint8_t *made = higher ? scratch : b[1].buf;
            resample_width(source, height, width, made, &across, scratch + between, avx2);
            source = made;
        }
        if (higher)
            resample_height(source, across.outputs * CHANNELS, b[1].buf, &down, avx2);
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

/* look_up(pixels, out, table, frames, height, width, patch height, patch width, merge, times) */
static PyObject *look_up(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    Py_ssize_t n[7];
    if (nargs != 10)
        return PyErr_Format(PyExc_TypeError, "expected 10 arguments, got %zd", nargs);
    for (int i = 0; i < 7; i++)
        if ((n[i] = PyLong_AsSsize_t(args[3 + i])) < 1)
            return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "argument %d must be positive", 4 + i);
    Py_ssize_t frames = n[0], height = n[1], width = n[2];
    Py_buffer b[3];
    if (!buffers_of(args, b, 3, 2))
        return NULL;
    Py_ssize_t item = b[2].len / (256 * CHANNELS), size = b[0].len / frames;
    Layout l = {.rows = height / n[3], .columns = width / n[4], .height = n[3], .width = n[4], .merge = n[5],
                .times = n[6], .row = width * CHANNELS, .frame = frames > 1 ? size : 0};
    int fits = height % n[3] == 0 && width % n[4] == 0 && l.rows % l.merge == 0 && l.columns % l.merge == 0 &&
               (frames == 1 || frames == l.times) && size / l.row == height && size % l.row == 0 &&
               size * frames == b[0].len && b[2].len == item * 256 * CHANNELS &&
               (item == 1 || item == 2 || item == 4) && (uintptr_t)b[1].buf % item == 0 &&
               b[1].len / item / l.times == height * width * CHANNELS && b[1].len % (item * l.times) == 0;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        const uint8_t *source = b[0].buf;
        if (item == 1)
            look_up_uint8_t(source, b[1].buf, b[2].buf, &l);
        else if (item == 2)
            look_up_uint16_t(source, b[1].buf, b[2].buf, &l);
        else
            look_up_uint32_t(source, b[1].buf, b[2].buf, &l);
        Py_END_ALLOW_THREADS
    } else
        PyErr_SetString(PyExc_ValueError, "the arrays do not fit each other");
    for (int i = 0; i < 3; i++)
        PyBuffer_Release(&b[i]);
    return fits ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef METHODS[] = {
    {"resample", (PyCFunction)(void (*)(void))resample, METH_FASTCALL, "Resize an image as Pillow does."},
    {"look_up", (PyCFunction)(void (*)(void))look_up, METH_FASTCALL, "Write values of bytes in a layout."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot SLOTS[] = {{0, NULL}};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_pixels", "Pixels for models.", 0, METHODS, SLOTS, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__pixels(void) { return PyModuleDef_Init(&MODULE); }
