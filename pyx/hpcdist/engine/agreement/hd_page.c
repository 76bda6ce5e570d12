/* The protocol of the page, one step per function: see hd_page.h. */
#include <string.h>

#include "hd_base.h"
#include "hd_comm.h"
#include "hd_job.h"
#include "hd_page.h"

#define JOINED_BIT (1u << 31)
#define VETO_MASK (JOINED_BIT - 1)

static uint32_t check_reached(uint64_t word) { return (uint32_t)(word >> 32); }
static int joined(uint64_t word) { return ((uint32_t)word & JOINED_BIT) != 0; }
static uint32_t veto_of(uint64_t word) { return (uint32_t)word & VETO_MASK; }
static int vetoed(uint64_t word, uint32_t n)
{
    return ((veto_of(word) - n) & VETO_MASK) < VETO_MASK / 2;
}

static uint64_t pack(uint32_t n, int joins, uint32_t veto)
{
    return (uint64_t)n << 32 | (joins ? JOINED_BIT : 0) | (veto & VETO_MASK);
}

static uint64_t load(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

static int swap(uint64_t *word, uint64_t *old, uint64_t new)
{
    return __atomic_compare_exchange_n(word, old, new, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

size_t hd_page_size(int n)
{
    return (size_t)n *
           (sizeof(hd_slot) + (n <= HD_CARRY_RANKS ? sizeof(hd_payload) : 0) + sizeof(hd_words));
}

enum hd_sight hd_page_look(const hd_comm *c, int rank, uint32_t n)
{
    const hd_slot *s = &c->page->slots[rank];
    const uint64_t word = load(&s->word);
    if (!hd_reached(check_reached(word), n))
        return vetoed(word, n) ? HD_ABANDONED : HD_NOT_YET;
    if (check_reached(word) == n)
        return joined(word) ? HD_JOINED : HD_ABANDONED;
    return __atomic_load_n(&s->decided, __ATOMIC_RELAXED) == n ? HD_JOINED : HD_ABANDONED;
}

int hd_page_behind(const hd_comm *c, uint32_t n)
{
    if (c->decided != n - 1)
        for (int r = 0; r < c->size; r++)
            if (r != c->rank && !hd_page_arrived(c, r, n - 1))
                return r;
    return -1;
}

int hd_page_join(hd_comm *c, uint32_t n)
{
    hd_slot *me = &c->page->slots[c->rank];
    uint64_t old = load(&me->word);
    int late;
    __atomic_store_n(&me->decided, c->decided, __ATOMIC_RELAXED);
    __atomic_store_n(&me->core, hd_core(), __ATOMIC_RELAXED);
    do
        late = vetoed(old, n);
    while (!swap(&me->word, &old, late ? pack(n, 0, veto_of(old)) : pack(n, 1, n - 1)));
    return !late;
}

void hd_page_pass(hd_comm *c, uint32_t n)
{
    hd_slot *me = &c->page->slots[c->rank];
    uint64_t old = load(&me->word);
    __atomic_store_n(&me->decided, c->decided, __ATOMIC_RELAXED);
    while (!swap(&me->word, &old, pack(n, 0, vetoed(old, n) ? veto_of(old) : n)))
        ;
}

int hd_page_veto(hd_comm *c, uint32_t n, hd_text *missing)
{
    int any = 0;
    for (int r = 0; r < c->size; r++) {
        uint64_t *word = &c->page->slots[r].word, old = load(word);
        while (!hd_reached(check_reached(old), n) && !vetoed(old, n))
            if (swap(word, &old, pack(check_reached(old), joined(old), n)))
                old = pack(check_reached(old), joined(old), n);
        if (hd_reached(check_reached(old), n))
            continue;
        any = 1;
        hd_say(missing, "%s%d", missing->used ? ", " : "", r);
    }
    return any;
}

/* ---- reasons ----
 *
 * A note may be overwritten while another rank reads it: the writer clears its number first and
 * writes it last, and the reader checks it before and after. */

/* How a slow rank learns that a check was refused whose note has been overwritten. */
static void count_refusal(hd_words *own, uint32_t n, int code)
{
    const uint64_t old = __atomic_load_n(&own->refused, __ATOMIC_RELAXED);
    const int goes_on = old && (uint32_t)old == n - 1;
    const uint32_t first = goes_on ? (uint32_t)(old >> 32) : n;
    if (goes_on && own->refused_code != code)
        code = HD_ERR_MISMATCH;
    if (!goes_on)
        __atomic_store_n(&own->refused, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&own->refused_code, code, __ATOMIC_RELEASE);
    __atomic_store_n(&own->refused, (uint64_t)first << 32 | n, __ATOMIC_RELEASE);
}

/* The code of a refusal; HD_OK: it is not in the last run. */
static int has_refused(const hd_words *of, uint32_t n)
{
    const uint64_t range = __atomic_load_n(&of->refused, __ATOMIC_ACQUIRE);
    const int code = __atomic_load_n(&of->refused_code, __ATOMIC_ACQUIRE);
    const uint64_t now = __atomic_load_n(&of->refused, __ATOMIC_RELAXED);
    const int there =
        range && hd_reached(n, (uint32_t)(range >> 32)) && hd_reached((uint32_t)range, n);
    if (!there)
        return HD_OK;
    return range >> 32 == now >> 32 ? code : HD_ERR_MISMATCH; /* another run has begun since */
}

void hd_page_leave_note(hd_comm *c, uint32_t n, int why, int code, double after, const char *text)
{
    hd_note *note = &hd_words_of(c)[c->rank].notes[n % HD_NOTES];
    char padded[HD_DESC] = "";
    hd_text t;
    hd_text_init(&t, padded, sizeof padded);
    hd_say(&t, "%s", text);
    __atomic_store_n(&note->check, n - HD_NOTES, __ATOMIC_RELAXED);
    __atomic_store_n(&note->why, why, __ATOMIC_RELEASE);
    __atomic_store_n(&note->code, code, __ATOMIC_RELEASE);
    __atomic_store(&note->after, &after, __ATOMIC_RELEASE);
    hd_put_words(note->text, padded, sizeof padded);
    __atomic_store_n(&note->check, n, __ATOMIC_RELEASE);
    if (why == HD_REFUSED && (code == HD_ERR_MISMATCH || code == HD_ERR_NAN)) /* what it gives */
        count_refusal(&hd_words_of(c)[c->rank], n, code);
}

static int read_note(const hd_note *note, uint32_t n, hd_note *out)
{
    out->check = __atomic_load_n(&note->check, __ATOMIC_ACQUIRE);
    if (out->check != n)
        return 0;
    out->why = __atomic_load_n(&note->why, __ATOMIC_ACQUIRE);
    out->code = __atomic_load_n(&note->code, __ATOMIC_ACQUIRE);
    __atomic_load(&note->after, &out->after, __ATOMIC_ACQUIRE);
    hd_get_words(out->text, note->text, sizeof out->text);
    out->text[HD_DESC - 1] = 0;
    return out->why && __atomic_load_n(&note->check, __ATOMIC_RELAXED) == n;
}

/* A refusal ranks above a rank that crossed, and that above one that only waited. */
int hd_page_find_note(const hd_comm *c, uint32_t n, int *rank, hd_note *out)
{
    hd_note next;
    int found = 0, code;
    for (int r = 0; r < c->size; r++)
        if (read_note(&hd_words_of(c)[r].notes[n % HD_NOTES], n, &next) &&
            (!found || next.why > out->why)) {
            *out = next;
            *rank = r;
            found = 1;
        }
    for (int r = 0; r < c->size && !(found && out->why == HD_REFUSED); r++)
        if ((code = has_refused(&hd_words_of(c)[r], n))) {
            *out = (hd_note){.check = n,
                             .why = HD_REFUSED,
                             .code = code,
                             .text = "its reason is not kept, it has gone on to later calls"};
            *rank = r;
            found = 1;
        }
    return found;
}

void hd_page_refused(const hd_comm *c, uint32_t n, int by, const hd_note *note, hd_refused *out)
{
    hd_note next;
    out->n = 0;
    memcpy(out->text, note->text, sizeof out->text);
    for (int r = 0; r < c->size; r++)
        if (read_note(&hd_words_of(c)[r].notes[n % HD_NOTES], n, &next) && next.why == note->why &&
            r != by && strcmp(next.text, note->text) == 0)
            hd_refused_by(out, r);
    hd_refused_by(out, by); /* even if its note has been overwritten since */
}
