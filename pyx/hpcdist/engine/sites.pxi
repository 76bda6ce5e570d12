# The calling line of every operation, for the flight recorder, at the price of a few loads. The
# interpreter's frames contain the address of the instruction that each executes. The addresses from
# the innermost frame to the program's own identify the calling line, so it is looked up by them; only
# a new one is turned into text. The code objects stay alive, so that no address means two lines. A
# table that is full is emptied, and fills again with the lines that the program still calls from.

cdef extern from * nogil:
    """
    #include <stdint.h>
    #if PY_VERSION_HEX >= 0x030B0000 && defined(__has_include)
    #if __has_include("internal/pycore_frame.h")
    #ifndef Py_BUILD_CORE
    #define Py_BUILD_CORE 1
    #endif
    #include "internal/pycore_frame.h"
    #define HD_FRAMES 1
    #endif
    #endif

    enum { HD_SITES = 4096, HD_DEPTH = 48 };
    static struct hd_known {
        uint64_t key;
        uint32_t depth; /* frames that the line's key covers, if more than the first two */
        uint32_t id;
    } hd_sites[HD_SITES];
    static uint32_t hd_sites_used;

    #if HD_FRAMES
    typedef struct _PyInterpreterFrame *hd_frame;
    static inline hd_frame hd_innermost(void)
    {
        PyThreadState *t = PyThreadState_Get();
    #if PY_VERSION_HEX >= 0x030D0000
        return t->current_frame;
    #else
        return t->cframe->current_frame;
    #endif
    }
    static inline hd_frame hd_outer(hd_frame f) { return f->previous; }
    static inline uint64_t hd_place(hd_frame f)
    {
    #if PY_VERSION_HEX >= 0x030D0000
        return (uint64_t)(uintptr_t)f->instr_ptr;
    #else
        return (uint64_t)(uintptr_t)f->prev_instr;
    #endif
    }
    static inline int hd_within(hd_frame f, PyObject *code)
    {
        const uint64_t from = (uint64_t)(uintptr_t)((PyCodeObject *)code)->co_code_adaptive;
        return hd_place(f) + 2 - from <= 2 * (uint64_t)Py_SIZE(code) + 2;
    }
    #elif PY_VERSION_HEX < 0x030B0000
    #include <frameobject.h>
    typedef PyFrameObject *hd_frame;
    static inline hd_frame hd_innermost(void) { return PyThreadState_Get()->frame; }
    static inline hd_frame hd_outer(hd_frame f) { return f->f_back; }
    static inline uint64_t hd_place(hd_frame f)
    {
        return (uint64_t)(uintptr_t)f->f_code + 2 * (uint64_t)(int64_t)f->f_lasti;
    }
    static inline int hd_within(hd_frame f, PyObject *code) { return (PyObject *)f->f_code == code; }
    #else
    typedef void *hd_frame;
    static inline hd_frame hd_innermost(void) { return NULL; }
    static inline hd_frame hd_outer(hd_frame f) { return f; }
    static inline uint64_t hd_place(hd_frame f) { return (uint64_t)(uintptr_t)f; }
    static inline int hd_within(hd_frame f, PyObject *code) { return (PyObject *)f == code; }
    #endif

    static inline uint64_t hd_key(uint64_t h, uint64_t place) { return (h ^ place) * 0x9e3779b97f4a7c15ULL; }
    static inline uint64_t hd_fold(uint64_t h) { return (h ^ h >> 32) | 1; }

    /* Its entry, or a free one; NULL: there is no room nearby. */
    static inline struct hd_known *hd_entry(uint64_t key)
    {
        for (uint32_t i = 0; i < 16; i++) {
            struct hd_known *k = &hd_sites[((key >> 20) + i) & (HD_SITES - 1)];
            if (k->key == key || !k->key)
                return k;
        }
        return NULL;
    }

    /* The key of the innermost `depth` frames. */
    static uint64_t hd_frames_key(uint32_t depth)
    {
        uint64_t h = depth;
        hd_frame f = hd_innermost();
        for (uint32_t i = 0; f && i < depth; i++, f = hd_outer(f))
            h = hd_key(h, hd_place(f));
        return hd_fold(h);
    }

    /* Frames from the innermost to the first that executes this code; 0: it is too far out. */
    static uint32_t hd_frames_to(PyObject *code)
    {
        uint32_t n = 1;
        for (hd_frame f = hd_innermost(); f && n <= HD_DEPTH; n++, f = hd_outer(f))
            if (hd_within(f, code))
                return n;
        return 0;
    }

    /* The number of the calling line; -1: it is a new one. */
    static inline int64_t hd_site_here(void)
    {
        const hd_frame first = hd_innermost(), second = first ? hd_outer(first) : NULL;
        const struct hd_known *k;
        uint64_t h = 2;
        if (!first)
            return 0;
        h = hd_key(h, hd_place(first));
        if (second)
            h = hd_key(h, hd_place(second));
        k = hd_entry(hd_fold(h));
        if (k && k->key && k->depth > 2)
            k = hd_entry(hd_frames_key(k->depth));
        return k && k->key ? (int64_t)k->id : -1;
    }

    /* Notes it; `depth` frames make it out. 0: there is no room. */
    static int hd_site_note(uint32_t id, uint32_t depth)
    {
        uint64_t key = hd_frames_key(2);
        struct hd_known *k = hd_entry(key);
        if (!k || hd_sites_used > HD_SITES / 2)
            return 0;
        if (depth > 2) {
            if (!k->key || k->depth < depth) {
                hd_sites_used += !k->key;
                k->key = key;
                k->depth = depth;
                k->id = id;
            }
            key = hd_frames_key(k->depth);
            k = hd_entry(key);
        }
        if (k && !k->key) {
            hd_sites_used++;
            k->depth = 0;
            k->id = id;
            k->key = key;
        }
        return k != NULL;
    }

    static void hd_sites_clear(void)
    {
        memset(hd_sites, 0, sizeof hd_sites);
        hd_sites_used = 0;
    }
    """
    int64_t hd_site_here()
    int hd_site_note(uint32_t id, uint32_t depth)
    uint32_t hd_frames_to(PyObject*)
    void hd_sites_clear()

cdef list site_codes = []     # code objects whose addresses are in the table
cdef dict site_numbers = {}   # (file, line, function) -> number
cdef dict site_texts = {}     # the lines by number, as messages show them
cdef dict site_older = {}     # those that the recorder has dropped last: operations may still run


cdef uint32_t site_here() noexcept:
    """The number of the calling line, 0: not known. With the GIL."""
    cdef int64_t known
    if hd_rec.ring == NULL:
        return 0
    known = hd_site_here()
    return <uint32_t> known if known >= 0 else new_site()


cdef uint32_t new_site() noexcept:
    """Notes a calling line that has not been seen. A handler that raises here raises later."""
    if PyErr_Occurred() != NULL:
        return 0
    try:
        return number_of_site()
    except BaseException as error:
        raise_later(error)
        return 0


cdef uint32_t number_of_site() except? 0:
    cdef uint32_t number = 0, depth = 2
    cdef object outer = calling_frame()
    if outer is not None:
        code = outer.f_code
        key = (code.co_filename, outer.f_lineno, code.co_name)
        found = site_numbers.get(key)
        number = write_site(outer, key) if found is None else found
        depth = hd_frames_to(<PyObject*> code)
    if depth and (number or outer is None):
        keep_codes(outer)
        if not hd_site_note(number, depth):
            empty_table()
            keep_codes(outer)
            hd_site_note(number, depth)
    return number


cdef bytes printable(str text):
    """A name without what a terminal obeys, or what ends a line of the recorder's log."""
    if not text.isprintable():
        text = "".join([c if c.isprintable() else c.encode("unicode_escape").decode() for c in text])
    return text.encode()


cdef uint32_t write_site(object frame, tuple key) except? 0:
    """Writes the line into the recorder's log; 0: there is no room."""
    global site_texts, site_older
    cdef uint32_t drops = hd_rec.drops
    cdef bytes path = printable(key[0]), function = printable(key[2]), text = printable(line_of(frame))
    cdef uint32_t number = hd_rec_site(frame.f_lineno, function, path)
    if hd_rec.drops != drops:
        empty_table()
        site_numbers.clear()
        site_older, site_texts = site_texts, {}
    if number:
        site_texts[number] = text
        site_numbers[key] = number
    return number


cdef bytes text_of_site(uint32_t number):
    text = site_texts.get(number)
    return site_older.get(number, b"") if text is None else text


cdef int keep_codes(object outer) except -1:
    """Keeps the code objects alive from the innermost frame to this one."""
    cdef object frame = sys._getframe()
    if len(site_codes) > 100_000:
        empty_table()
    while frame is not None:
        site_codes.append(frame.f_code)
        if frame is outer:
            break
        frame = frame.f_back
    return 0


cdef void empty_table() noexcept:
    hd_sites_clear()
    del site_codes[:]
