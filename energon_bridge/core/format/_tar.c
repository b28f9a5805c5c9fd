/* Splitting the bytes of a sample into its parts, where its tar headers are plain: see `parse_sample` in tar.py. And
   checksums: see `crc32s` in checksums.py.

   Every sample that is read goes through here. Whatever is not plain (long names, folders, other spellings of sizes,
   a range that is cut off) is left to the Python code, which knows it all and says what is wrong. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 512
#define NAME 100 /* bytes of the name, at 0 */
#define SIZE 124 /* where the others are */
#define TYPE 156
#define MAGIC 257
#define PREFIX 345

/* Return the size that a header gives, or -1 where it is not spelled as eleven octal digits. */
static Py_ssize_t size_of(const char *header) {
    const char *digits = header + SIZE;
    Py_ssize_t size = 0;
    for (int i = 0; i < 11; i++) {
        if (digits[i] < '0' || digits[i] > '7')
            return -1;
        size = size * 8 + (digits[i] - '0');
    }
    return digits[11] == 0 || digits[11] == ' ' ? size : -1;
}

/* Return how much of a name is its key and the dot behind, or 0 where that takes a look at the whole name. */
static Py_ssize_t key_and_dot(const char *name, Py_ssize_t length) {
    Py_ssize_t folder = 0, dot = -1; /* the first one behind the last folder */
    for (Py_ssize_t i = 0; i < length; i++) {
        if ((unsigned char)name[i] > 127 || name[i] == '\n')
            return 0;
        if (name[i] == '/')
            folder = i + 1, dot = -1;
        else if (name[i] == '.' && dot < 0)
            dot = i;
    }
    return dot > folder && strncmp(name, "__", 2) ? dot + 1 : 0;
}

/* Tell whether PAX records, mostly the times that webdataset's writers put in front of every member, change how it is
   read: those of its path, its size (also of a sparse file, which is one of `GNU.sparse`). */
static int matter(const char *records, Py_ssize_t length) {
    for (Py_ssize_t i = 0; i + 5 <= length; i++)
        if (!memcmp(records + i, "path=", 5) || !memcmp(records + i, "size=", 5) || !memcmp(records + i, "GNU.s", 5))
            return 1;
    return 0;
}

/* Return view[from:to]. */
static PyObject *piece(PyObject *view, Py_ssize_t from, Py_ssize_t to) {
    PyObject *found = NULL, *low = PyLong_FromSsize_t(from), *high = PyLong_FromSsize_t(to);
    PyObject *range = low && high ? PySlice_New(low, high, NULL) : NULL;
    if (range)
        found = PyObject_GetItem(view, range);
    Py_XDECREF(range);
    Py_XDECREF(low);
    Py_XDECREF(high);
    return found;
}

/* Add the parts in data[position:stop] to `found`: pieces of `view`, or bytes where that is NULL. Return the length of the
   key, with `*key` where it is, 0 where the Python code has to look, or -1 with an error set. */
static Py_ssize_t collect(const Py_buffer *data, Py_ssize_t position, Py_ssize_t stop, PyObject *view, PyObject *wanted,
                          PyObject *found, const char **key) {
    Py_ssize_t prefix = 0, taken = 0;
    while (position + BLOCK <= stop) {
        const char *header = (const char *)data->buf + position;
        Py_ssize_t size = size_of(header), content = position + BLOCK;
        if (size < 0 || size > stop - content || memcmp(header + MAGIC, "ustar", 5))
            return 0;
        position = content + (size + BLOCK - 1) / BLOCK * BLOCK;
        if (header[TYPE] == 'x') {
            if (position + BLOCK > stop || matter(header + BLOCK, size))
                return 0;
            continue;
        }
        if (header[TYPE] != '0' || header[PREFIX])
            return 0;
        const char *end = memchr(header, 0, NAME);
        Py_ssize_t length = end ? end - header : NAME;
        if (!prefix) {
            prefix = key_and_dot(header, length);
            *key = header;
        }
        if (!prefix || length < prefix || memcmp(header, *key, prefix))
            return 0;
        const char *part = header + prefix;
        length -= prefix;
        if (memchr(part, '/', length) || memchr(part, '\n', length))
            return 0;
        PyObject *name = PyUnicode_DecodeUTF8(part, length, NULL);
        if (!name) {
            PyErr_Clear();
            return 0;
        }
        int takes = wanted == Py_None ? 1 : PySequence_Contains(wanted, name);
        PyObject *value = takes <= 0 ? NULL
                          : view     ? piece(view, content, content + size)
                                     : PyBytes_FromStringAndSize((const char *)data->buf + content, size);
        int failed = takes < 0 || (takes && (!value || PyDict_SetItem(found, name, value)));
        Py_XDECREF(value);
        Py_DECREF(name);
        if (failed)
            return -1;
        taken += takes;
    }
    return prefix && PyDict_Size(found) == taken ? prefix - 1 : 0; /* not with a part twice */
}

static PyObject *split(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    Py_buffer data;
    if (nargs != 2)
        return PyErr_Format(PyExc_TypeError, "expected a memoryview and the names of parts, got %zd arguments", nargs);
    if (PyObject_GetBuffer(args[0], &data, PyBUF_SIMPLE))
        return NULL;
    const char *key = NULL;
    PyObject *found = PyDict_New(), *result = NULL;
    Py_ssize_t length = found ? collect(&data, 0, data.len, args[0], args[1], found, &key) : -1;
    if (length > 0)
        /* No "s#": what Python 3.13 and later make of it does not run in earlier ones. */
        result = Py_BuildValue("(NO)", PyUnicode_FromStringAndSize(key, length), found);
    else if (!length)
        result = Py_NewRef(Py_None);
    Py_XDECREF(found);
    PyBuffer_Release(&data);
    return result;
}

/* Append the parts of a sample to the columns, which the first one begins. Return 0 where they are not the same. */
static int add_to(PyObject *columns, PyObject *found, int first) {
    PyObject *name, *value, *column, *expected;
    Py_ssize_t at = 0, place = 0;
    while (PyDict_Next(found, &at, &name, &value)) {
        if (first) {
            column = PyList_New(0);
            int failed = !column || PyDict_SetItem(columns, name, column);
            Py_XDECREF(column);
            if (failed)
                return -1;
        } else if (!PyDict_Next(columns, &place, &expected, &column) || PyUnicode_Compare(name, expected))
            return PyErr_Occurred() ? -1 : 0;
        if (PyList_Append(column, value))
            return -1;
    }
    return PyDict_Size(found) == PyDict_Size(columns);
}

static PyObject *split_all(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    Py_buffer ranges, data;
    if (nargs != 3)
        return PyErr_Format(PyExc_TypeError, "expected blocks, ranges and names of parts, got %zd arguments", nargs);
    if (PyObject_GetBuffer(args[1], &ranges, PyBUF_SIMPLE))
        return NULL;
    Py_ssize_t count = PyList_Size(args[0]);
    const int64_t *begins = ranges.buf, *ends = begins + count;
    PyObject *keys = PyList_New(0), *columns = PyDict_New();
    int going = count >= 0 && keys && columns ? ranges.len == 16 * count : -1;
    for (Py_ssize_t i = 0; going > 0 && i < count; i++) {
        const char *name = NULL;
        PyObject *block = PyList_GetItem(args[0], i), *found = NULL, *key = NULL;
        if (ends[i] < 0 || PyObject_GetBuffer(block, &data, PyBUF_SIMPLE)) {
            going = ends[i] < 0 ? 0 : -1;
            break;
        }
        Py_ssize_t length = 0;
        if (begins[i] >= 0 && ends[i] <= data.len)
            length = (found = PyDict_New()) ? collect(&data, begins[i], ends[i], NULL, args[2], found, &name) : -1;
        going = length < 0 ? -1 : !length ? 0 : (key = PyUnicode_FromStringAndSize(name, length)) ? 1 : -1;
        if (going > 0)
            going = PyList_Append(keys, key) ? -1 : add_to(columns, found, !i);
        Py_XDECREF(key);
        Py_XDECREF(found);
        PyBuffer_Release(&data);
    }
    PyBuffer_Release(&ranges);
    PyObject *result = going < 0 ? NULL : going ? Py_BuildValue("(OO)", keys, columns) : Py_NewRef(Py_None);
    Py_XDECREF(keys);
    Py_XDECREF(columns);
    return result;
}

/* CRC-32 of zlib, sixteen bytes at a time by carry-less multiplication: V. Gopal and others, "Fast CRC computation for
   generic polynomials using PCLMULQDQ instruction", Intel, 2009. Its constants are powers of x modulo the polynomial. */
#if defined(__x86_64__) && defined(__GNUC__)
#include "../processor.h"
#include <immintrin.h>
#define FOLD512(x, by, y) \
    _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(x, by, 0x00), _mm512_clmulepi64_epi128(x, by, 0x11), y, 0x96)
#define FOLD(x, by) _mm_xor_si128(_mm_clmulepi64_si128(x, by, 0x00), _mm_clmulepi64_si128(x, by, 0x11))
#define LOAD(at) _mm_loadu_si128((const __m128i *)(at))

static uint32_t by_table(uint32_t crc, const unsigned char *data, size_t length) {
    static uint32_t table[256];
    if (!table[1])
        for (uint32_t i = 256; i-- > 0;) {
            uint32_t value = i;
            for (int bit = 0; bit < 8; bit++)
                value = value & 1 ? value >> 1 ^ 0xEDB88320u : value >> 1;
            table[i] = value;
        }
    while (length--)
        crc = crc >> 8 ^ table[(crc ^ *data++) & 255];
    return crc;
}

/* Fold whole pieces of 256 bytes into 64, with the registers of AVX-512; return how much of the data that were. */
__attribute__((target("avx512f,vpclmulqdq"))) static size_t fold_wide(const unsigned char *data, size_t length, void *to) {
    const __m512i by256 = _mm512_broadcast_i32x4(_mm_set_epi64x(0x1322d1430, 0x11542778a));
    const __m512i by64 = _mm512_broadcast_i32x4(_mm_set_epi64x(0x1c6e41596, 0x154442bd4));
    __m512i a = _mm512_xor_si512(_mm512_loadu_si512(data), _mm512_zextsi128_si512(_mm_cvtsi32_si128(~0)));
    __m512i b = _mm512_loadu_si512(data + 64), c = _mm512_loadu_si512(data + 128), d = _mm512_loadu_si512(data + 192);
    size_t done = 256;
    for (; length - done >= 256; done += 256) {
        a = FOLD512(a, by256, _mm512_loadu_si512(data + done));
        b = FOLD512(b, by256, _mm512_loadu_si512(data + done + 64));
        c = FOLD512(c, by256, _mm512_loadu_si512(data + done + 128));
        d = FOLD512(d, by256, _mm512_loadu_si512(data + done + 192));
    }
    _mm512_storeu_si512(to, FOLD512(FOLD512(FOLD512(a, by64, b), by64, c), by64, d));
    return done;
}

__attribute__((target("pclmul,sse4.1"))) static uint32_t crc32_of(const unsigned char *data, size_t length) {
    uint32_t crc = ~0u;
    if (length >= 64) {
        const __m128i by64 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), by16 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
        const __m128i by8 = _mm_set_epi64x(0, 0x163cd6124), poly = _mm_set_epi64x(0x1f7011641, 0x1db710641);
        const __m128i low = _mm_set_epi32(0, ~0, 0, ~0);
        unsigned char folded[64];
        size_t done = 64;
        __m128i a = _mm_xor_si128(LOAD(data), _mm_cvtsi32_si128((int)crc));
        __m128i b = LOAD(data + 16), c = LOAD(data + 32), d = LOAD(data + 48);
        if (length >= 512 && instructions() & WIDE_CRC) {
            done = fold_wide(data, length, folded);
            a = LOAD(folded), b = LOAD(folded + 16), c = LOAD(folded + 32), d = LOAD(folded + 48);
        }
        for (data += done, length -= done; length >= 64; data += 64, length -= 64) {
            a = _mm_xor_si128(FOLD(a, by64), LOAD(data));
            b = _mm_xor_si128(FOLD(b, by64), LOAD(data + 16));
            c = _mm_xor_si128(FOLD(c, by64), LOAD(data + 32));
            d = _mm_xor_si128(FOLD(d, by64), LOAD(data + 48));
        }
        a = _mm_xor_si128(FOLD(a, by16), b);
        a = _mm_xor_si128(FOLD(a, by16), c);
        a = _mm_xor_si128(FOLD(a, by16), d);
        for (; length >= 16; data += 16, length -= 16)
            a = _mm_xor_si128(FOLD(a, by16), LOAD(data));
        a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by16, 0x10));
        b = _mm_srli_si128(a, 4);
        a = _mm_xor_si128(_mm_clmulepi64_si128(_mm_and_si128(a, low), by8, 0x00), b);
        b = _mm_and_si128(_mm_clmulepi64_si128(_mm_and_si128(a, low), poly, 0x10), low);
        crc = (uint32_t)_mm_extract_epi32(_mm_xor_si128(a, _mm_clmulepi64_si128(b, poly, 0x00)), 1);
    }
    return ~by_table(crc, data, length);
}

static int has_crc32(void) { return instructions() & CRC; }
#else
static uint32_t crc32_of(const unsigned char *data, size_t length) { return 0; }
static int has_crc32(void) { return 0; }
#endif

static PyObject *crc32s(PyObject *module, PyObject *pieces) {
    if (!has_crc32())
        return Py_NewRef(Py_None);
    Py_ssize_t count = PyList_Size(pieces);
    PyObject *result = count < 0 ? NULL : PyBytes_FromStringAndSize(NULL, 4 * count);
    for (Py_ssize_t i = 0; result && i < count; i++) {
        Py_buffer data;
        if (PyObject_GetBuffer(PyList_GetItem(pieces, i), &data, PyBUF_SIMPLE)) {
            Py_CLEAR(result);
            break;
        }
        uint32_t crc = crc32_of(data.buf, (size_t)data.len);
        memcpy(PyBytes_AsString(result) + 4 * i, &crc, 4);
        PyBuffer_Release(&data);
    }
    return result;
}

static PyMethodDef METHODS[] = {
    {"crc32s", crc32s, METH_O, "Return the CRC-32 of each buffer of a list as bytes, or None where zlib is as fast."},
    {"split", (PyCFunction)(void (*)(void))split, METH_FASTCALL, "Return key and parts, or None where it is not plain."},
    {"split_all", (PyCFunction)(void (*)(void))split_all, METH_FASTCALL,
     "Return the keys and each part of samples, or None where one is not plain or has other parts than the first."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_tar", "Plain samples of a tar.", 0, METHODS, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__tar(void) { return PyModuleDef_Init(&MODULE); }
