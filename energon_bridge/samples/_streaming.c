/* Writing to memory past the caches: see streaming.py.

   An ordinary store first reads the line that it is about to overwrite, and what is written drives everything else
   out of the caches. Streaming stores do neither. They pay for memory that is larger than the caches and that nobody
   reads soon, which is what the batches under way to a trainer are. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define LINE 32 /* bytes of a register, at a multiple of which its streaming store has to begin */

typedef void (*Kernel)(const uint8_t *source, void *out, Py_ssize_t bytes);

__attribute__((target("avx2"))) static void divide_pixels(const uint8_t *source, void *out, Py_ssize_t bytes) {
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

__attribute__((target("avx2"))) static void copy_bytes(const uint8_t *source, void *out, Py_ssize_t bytes) {
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
static PyObject *run(PyObject *const *args, Py_ssize_t nargs, Py_ssize_t from, Py_ssize_t to, Kernel kernel) {
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
    return run(args, nargs, 1, sizeof(float), divide_pixels);
}

static PyObject *copy(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    return run(args, nargs, 0, 0, copy_bytes);
}

static int execute(PyObject *module) {
    if (__builtin_cpu_supports("avx2"))
        return 0;
    PyErr_SetString(PyExc_ImportError, "this processor has no AVX2");
    return -1;
}

static PyMethodDef METHODS[] = {
    {"divide", (PyCFunction)(void (*)(void))divide, METH_FASTCALL, "Write pixels, divided by 255, to float32 memory."},
    {"copy", (PyCFunction)(void (*)(void))copy, METH_FASTCALL, "Copy numbers of any one type."},
    {NULL, NULL, 0, NULL},
};

#else
static int execute(PyObject *module) {
    PyErr_SetString(PyExc_ImportError, "there is nothing here for this processor or compiler");
    return -1;
}

static PyMethodDef METHODS[] = {{NULL, NULL, 0, NULL}};
#endif

static PyModuleDef_Slot SLOTS[] = {{Py_mod_exec, (void *)execute}, {0, NULL}};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_streaming", "Writing past the caches.", 0, METHODS, SLOTS, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__streaming(void) { return PyModuleDef_Init(&MODULE); }
