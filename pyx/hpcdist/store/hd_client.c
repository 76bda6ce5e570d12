#define _GNU_SOURCE /* sched_getaffinity */

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "hd_client.h"
#include "hd_mac.h"
#include "hd_wire.h"

#define SLICE_NS 50000000 /* how often the client checks for signals */
/* A server on this machine answers within this time; sleeping costs 5 us more. */
#define SPIN_NS 25000
enum {
    ROOM = 16 * 1024, /* of the buffer, for typical requests and replies */
    KEPT = 1 << 20,   /* a longer buffer is not kept */
    PIECE = 256 * 1024
};

void hd_client_init(hd_client *c)
{
    memset(c, 0, sizeof *c);
    c->fd = -1;
}

/* After a call that made no progress: checks for signals, then the time. */
static int go_on(int64_t deadline, hd_hook hook)
{
    if (hook && hook())
        return HD_SIGNAL;
    return hd_clock() >= deadline ? HD_TOO_LATE : HD_FINE;
}

/* After a call that made progress, but is not the last one. */
static int pace(hd_client *c, int64_t deadline, hd_hook hook)
{
    int64_t now = hd_clock();
    if (now < c->look)
        return HD_FINE;
    c->look = now + SLICE_NS;
    return go_on(deadline, hook);
}

/* The socket's own timeout is one slice; poll waits for what is left if that is less than a
 * slice. */
static int short_wait(int fd, short what, int64_t deadline)
{
    int64_t left = deadline - hd_clock();
    if (left >= SLICE_NS)
        return 1;
    struct pollfd p = {.fd = fd, .events = what};
    return poll(&p, 1, left > 0 ? (int)((left + 999999) / 1000000) : 0) > 0;
}

static int give(hd_client *c, const uint8_t *data, uint64_t size, int64_t deadline, hd_hook hook)
{
    while (size) {
        int rc;
        ssize_t n = send(c->fd, data, size < PIECE ? size : PIECE, MSG_NOSIGNAL);
        if (n > 0) {
            data += n;
            size -= (uint64_t)n;
            if (size && (rc = pace(c, deadline, hook)) != HD_FINE)
                return rc;
            continue;
        }
        if (n < 0 && errno != EAGAIN && errno != EINTR)
            return errno == EPIPE || errno == ECONNRESET ? HD_GONE : HD_SYSTEM;
        if ((rc = go_on(deadline, hook)) != HD_FINE)
            return rc;
    }
    return HD_FINE;
}

/* Looks for an answer for a moment without sleeping, if there is a core for the server too; where
 * that core is busy, the server may run on this one. */
static ssize_t look(int fd, uint8_t *into, uint64_t room)
{
    static int cores;
    int64_t end = hd_clock() + SPIN_NS;
    ssize_t n = -1;
    if (!__atomic_load_n(&cores, __ATOMIC_RELAXED)) {
        cpu_set_t set;
        /* EINVAL: the machine has more CPUs than the set */
        int found =
            sched_getaffinity(0, sizeof set, &set) ? 1 + (errno == EINVAL) : CPU_COUNT(&set);
        __atomic_store_n(&cores, found, __ATOMIC_RELAXED);
    }
    if (__atomic_load_n(&cores, __ATOMIC_RELAXED) > 1) {
        do
            n = recv(fd, into, room, MSG_DONTWAIT);
        while (n < 0 && errno == EAGAIN && hd_clock() < end && !sched_yield());
    }
    return n;
}

/* Receives at least one byte. */
static int take(hd_client *c, uint8_t *into, uint64_t room, int64_t deadline, hd_hook hook,
                uint64_t *got)
{
    for (;;) {
        int rc;
        if (short_wait(c->fd, POLLIN, deadline)) {
            ssize_t n = recv(c->fd, into, room, 0);
            if (n > 0) {
                *got = (uint64_t)n;
                return HD_FINE;
            }
            if (n == 0 || errno == ECONNRESET)
                return HD_GONE;
            if (errno != EAGAIN && errno != EINTR)
                return HD_SYSTEM;
        }
        if ((rc = go_on(deadline, hook)) != HD_FINE)
            return rc;
    }
}

static int take_all(hd_client *c, uint8_t *into, uint64_t size, int64_t deadline, hd_hook hook)
{
    while (size) {
        uint64_t got;
        int rc = take(c, into, size, deadline, hook, &got);
        if (rc != HD_FINE)
            return rc;
        into += got;
        size -= got;
        if (size && (rc = pace(c, deadline, hook)) != HD_FINE)
            return rc;
    }
    return HD_FINE;
}

static int magic(const uint8_t *word)
{
    if (!memcmp(word, HD_MAGIC_TEXT, HD_MAGIC))
        return HD_FINE;
    if (!memcmp(word, HD_REFUSED_TEXT, HD_MAGIC))
        return HD_REFUSED;
    return memcmp(word, HD_CROWDED_TEXT, HD_MAGIC) ? HD_FOREIGN : HD_CROWDED;
}

int hd_client_begin(hd_client *c, int fd, const uint8_t key[HD_KEY], int64_t deadline, hd_hook hook)
{
    uint8_t greeting[HD_GREETING], answer[HD_ANSWER], welcome[HD_WELCOME], proof[HD_PROOF];
    struct timeval slice = {.tv_usec = SLICE_NS / 1000};
    const uint8_t *theirs = greeting + HD_MAGIC;
    uint8_t *ours = answer + HD_MAGIC;
    int rc;
    c->look = hd_clock() + SLICE_NS;
    c->fd = fd;
    c->room = ROOM;
    c->buffer = malloc(ROOM);
    if (!c->buffer)
        return HD_NO_MEMORY;
    if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &slice, sizeof slice) ||
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &slice, sizeof slice))
        return HD_SYSTEM;
    if ((rc = take_all(c, greeting, HD_MAGIC, deadline, hook)) || (rc = magic(greeting)) ||
        (rc = take_all(c, greeting + HD_MAGIC, HD_NONCE, deadline, hook)))
        return rc;
    memcpy(answer, HD_MAGIC_TEXT, HD_MAGIC);
    if (hd_random(ours, HD_NONCE))
        return HD_SYSTEM;
    hd_proof(key, 0, theirs, ours, NULL, ours + HD_NONCE);
    if ((rc = give(c, answer, sizeof answer, deadline, hook)) ||
        (rc = take_all(c, welcome, HD_MAGIC, deadline, hook)) || (rc = magic(welcome)) ||
        (rc = take_all(c, welcome + HD_MAGIC, HD_WELCOME - HD_MAGIC, deadline, hook)))
        return rc;
    memcpy(c->identity, welcome + HD_MAGIC, HD_IDENTITY);
    hd_proof(key, 1, theirs, ours, c->identity, proof);
    if (!hd_mac_equal(proof, welcome + HD_MAGIC + HD_IDENTITY, HD_PROOF))
        return HD_IMPOSTOR;
    hd_seals(key, theirs, ours, &c->up, &c->down);
    return HD_FINE;
}

/* A request that fits the buffer is sent in one call; longer items are sent from where they are. */
static int ask(hd_client *c, const hd_head *head, const hd_item *items, int64_t deadline,
               hd_hook hook)
{
    uint64_t used = HD_HEAD;
    hd_mac m;
    int rc;
    hd_seal_begin(&c->up, &m);
    hd_head_pack(head, c->buffer);
    for (uint32_t i = 0; i < head->items; i++) {
        uint64_t size = items[i].size;
        int unbuffered = size > c->room / 4;
        if (used + 8 + (unbuffered ? 0 : size) > c->room - HD_TAG) {
            hd_mac_update(&m, c->buffer, used);
            if ((rc = give(c, c->buffer, used, deadline, hook)))
                return rc;
            used = 0;
        }
        hd_store64(c->buffer + used, size);
        used += 8;
        if (!unbuffered) {
            memcpy(c->buffer + used, items[i].at, size);
            used += size;
            continue;
        }
        hd_mac_update(&m, c->buffer, used);
        if ((rc = give(c, c->buffer, used, deadline, hook)))
            return rc;
        used = 0;
        for (uint64_t at = 0; at < size;) {
            uint64_t n = size - at < PIECE ? size - at : PIECE;
            hd_mac_update(&m, items[i].at + at, n);
            if ((rc = give(c, items[i].at + at, n, deadline, hook)))
                return rc;
            at += n;
        }
    }
    hd_mac_update(&m, c->buffer, used);
    hd_mac_final(&m, c->buffer + used);
    return give(c, c->buffer, used + HD_TAG, deadline, hook);
}

static int widen(hd_client *c, uint64_t have, uint64_t total)
{
    if (have < c->room)
        return HD_FINE;
    /* to hold what has arrived, not what was announced */
    uint64_t room = 2 * c->room < total ? 2 * c->room : total;
    uint8_t *wider = realloc(c->buffer, room);
    if (!wider)
        return HD_NO_MEMORY;
    c->buffer = wider;
    c->room = room;
    return HD_FINE;
}

static int hear(hd_client *c, hd_reply *r, int64_t deadline, hd_hook hook)
{
    uint64_t have = 0, total = HD_HEAD + HD_TAG, got;
    int rc, known = 0;
    uint8_t tag[HD_TAG];
    hd_mac m;
    ssize_t first = look(c->fd, c->buffer, c->room);
    while (have < total) {
        if (first > 0) {
            have = (uint64_t)first;
            first = 0;
        } else if ((rc = widen(c, have, total)) ||
                   (rc = take(c, c->buffer + have, c->room - have, deadline, hook, &got))) {
            return rc;
        } else {
            have += got;
            if (have < total && (rc = pace(c, deadline, hook)))
                return rc;
        }
        if (!known && have >= HD_HEAD) {
            if (hd_head_unpack(c->buffer, &r->head))
                return HD_IMPOSTOR;
            total += r->head.body;
            known = 1;
        }
    }
    hd_seal_begin(&c->down, &m);
    hd_mac_update(&m, c->buffer, total - HD_TAG);
    hd_mac_final(&m, tag);
    if (have != total || !hd_mac_equal(tag, c->buffer + total - HD_TAG, HD_TAG))
        return HD_IMPOSTOR;
    r->body = c->buffer + HD_HEAD;
    return HD_FINE;
}

int hd_client_call(hd_client *c, hd_head *head, const hd_item *items, int64_t deadline,
                   hd_hook hook, hd_reply *reply)
{
    int rc;
    c->look = hd_clock() + SLICE_NS;
    head->id = ++c->id;
    head->body = 0;
    for (uint32_t i = 0; i < head->items; i++)
        head->body += 8 + items[i].size;
    if ((rc = ask(c, head, items, deadline, hook)) || (rc = hear(c, reply, deadline, hook)))
        return rc;
    return reply->head.id == head->id ? HD_FINE : HD_IMPOSTOR;
}

int hd_client_ended(const hd_client *c)
{
    uint8_t byte;
    ssize_t n = recv(c->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return !(n < 0 && (errno == EAGAIN || errno == EINTR)); /* the server sends nothing unasked */
}

void hd_client_relax(hd_client *c)
{
    if (c->room > KEPT) {
        uint8_t *small = realloc(c->buffer, ROOM);
        if (small) {
            c->buffer = small;
            c->room = ROOM;
        }
    }
}

void hd_client_end(hd_client *c)
{
    if (c->fd >= 0)
        close(c->fd);
    free(c->buffer);
    hd_client_init(c);
}
