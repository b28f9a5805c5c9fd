/* Splitting the bytes of a sample into its parts, where its tar headers are plain: see `parse_sample` in tar.py.

   Every sample that is read goes through here. Whatever is not plain (long names, folders, other spellings of sizes,
   a range that is cut off) is left to the Python code, which knows it all and says what is wrong. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
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

/* Add the parts in `data` to `found`. Return the length of the key, with `*key` where it is, 0 where the Python code has
   to look, or -1 with an error set. */
static Py_ssize_t collect(const Py_buffer *data, PyObject *view, PyObject *wanted, PyObject *found, const char **key) {
    Py_ssize_t prefix = 0, position = 0, taken = 0;
    while (position + BLOCK <= data->len) {
        const char *header = (const char *)data->buf + position;
        Py_ssize_t size = size_of(header), content = position + BLOCK;
        if (size < 0 || size > data->len - content || memcmp(header + MAGIC, "ustar", 5))
            return 0;
        position = content + (size + BLOCK - 1) / BLOCK * BLOCK;
        if (header[TYPE] == 'x') {
            if (position + BLOCK > data->len || matter(header + BLOCK, size))
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
        PyObject *value = takes > 0 ? piece(view, content, content + size) : NULL;
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
    Py_ssize_t length = found ? collect(&data, args[0], args[1], found, &key) : -1;
    if (length > 0)
        /* No "s#": what Python 3.13 and later make of it does not run in earlier ones. */
        result = Py_BuildValue("(NO)", PyUnicode_FromStringAndSize(key, length), found);
    else if (!length)
        result = Py_NewRef(Py_None);
    Py_XDECREF(found);
    PyBuffer_Release(&data);
    return result;
}

static PyMethodDef METHODS[] = {
    {"split", (PyCFunction)(void (*)(void))split, METH_FASTCALL, "Return key and parts, or None where it is not plain."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_tar", "Plain samples of a tar.", 0, METHODS, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__tar(void) { return PyModuleDef_Init(&MODULE); }
