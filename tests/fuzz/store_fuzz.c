/* Sends a TCPStore's server what no client would, with and without the job's key: run it under the
 * sanitizers of the compiler. From the repository's root:
 *
 *   gcc -g -O1 -std=gnu11 -fsanitize=address,undefined -fno-sanitize-recover=all -pthread \
 *       -Ipyx/hpcdist/store tests/fuzz/store_fuzz.c pyx/hpcdist/store/hd_*.c -o /tmp/store_fuzz
 *   /tmp/store_fuzz 60 1        # seconds, seed
 *
 * Many connections say random things about few keys, so that they wait for each other, and leave at
 * any moment. It ends with a count of what was sent, or where a sanitizer stops it. */
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "hd_client.h"
#include "hd_server.h"

enum { CONNECTIONS = 24, LONGEST = 400000 };

static const uint8_t key[HD_KEY] = "a key that both of them know ...";
static uint64_t state;
static uint8_t body[LONGEST * 2];

static uint64_t chance(uint64_t n) /* 0 to n - 1 */
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % n;
}

static int reach(int port)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(fd, (struct sockaddr *)&to, sizeof to)) {
        perror("connect");
        exit(1);
    }
    return fd;
}

static uint64_t put_item(uint64_t at, uint64_t size, int as_key)
{
    hd_store64(body + at, size);
    for (uint64_t i = 0; i < size; i++)
        body[at + 8 + i] = as_key ? (uint8_t)('a' + chance(3)) : (uint8_t)('0' + chance(10));
    return at + 8 + size;
}

/* A message with a right tag and, often, senseless contents. */
static void speak(hd_client *c)
{
    static const int64_t numbers[] = {0, 1, 2, 3, -1, INT64_MAX, INT64_MIN, 7};
    static const int64_t waits[] = {0, 0, 1, 1000, 3000000, 20000000, -1, INT64_MAX, INT64_MIN};
    uint64_t size = 0, items = chance(5);
    uint8_t head[HD_HEAD], tag[HD_TAG];
    hd_head h = {.id = (uint32_t)chance(9), .op = (uint16_t)chance(HD_OP_END + 2)};
    if (!chance(400))
        items = chance(3000);
    for (uint64_t i = 0; i < items && size < LONGEST; i++) {
        int as_key = i % 2 == 0 || chance(2);
        uint64_t length = chance(as_key ? 3 : 40);
        if (!as_key && !chance(30))
            length = chance(chance(4) ? 9000 : LONGEST / 2);
        size = put_item(size, length, as_key);
        h.items++;
    }
    h.number = numbers[chance(8)];
    h.wait_ns = waits[chance(9)];
    h.body = size;
    if (!chance(12) && size)
        body[chance(size)] ^= (uint8_t)(1 << chance(8)); /* lengths among it */
    if (!chance(25))
        h.items = (uint32_t)chance(UINT32_MAX);
    if (!chance(25))
        h.body = chance(size + 1);
    if (!chance(60))
        h.body = state;
    hd_head_pack(&h, head);
    uint64_t told = h.body < size ? h.body : size;
    hd_mac m;
    hd_seal_begin(&c->up, &m);
    hd_mac_update(&m, head, HD_HEAD);
    hd_mac_update(&m, body, told);
    hd_mac_final(&m, tag);
    if (!chance(80))
        tag[chance(HD_TAG)] ^= 1;
    uint8_t *all = malloc(HD_HEAD + told + HD_TAG);
    memcpy(all, head, HD_HEAD);
    memcpy(all + HD_HEAD, body, told);
    memcpy(all + HD_HEAD + told, tag, HD_TAG);
    uint64_t total = HD_HEAD + told + HD_TAG, at = 0;
    if (!chance(60))
        total = chance(total); /* and the rest never comes */
    while (at < total) {
        uint64_t n = chance(3) ? total - at : 1 + chance(total - at);
        ssize_t done = send(c->fd, all + at, n, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (done <= 0)
            break;
        at += (uint64_t)done;
    }
    free(all);
}

int main(int argc, char **argv)
{
    double seconds = argc > 1 ? atof(argv[1]) : 10;
    state = argc > 2 ? strtoull(argv[2], NULL, 10) * 0x9e3779b97f4a7c15ULL | 1 : 88172645463325252ULL;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(listener, (struct sockaddr *)&at, size) || listen(listener, 100) ||
        getsockname(listener, (struct sockaddr *)&at, &size))
        return 1;
    hd_limits limits = {.bytes = 4 << 20, .handshake_ns = 50000000, .message_ns = 100000000,
                        .idle_ns = 200000000, .connections = CONNECTIONS - 2, .strangers = 8,
                        .world_size = 3};
    hd_server *server = hd_server_start(&listener, 1, key, &limits);
    if (!server)
        return 1;
    hd_client clients[CONNECTIONS];
    for (int i = 0; i < CONNECTIONS; i++)
        hd_client_init(&clients[i]);
    int64_t end = hd_clock() + (int64_t)(seconds * 1e9);
    unsigned long said = 0, garbage = 0, joined = 0;
    while (hd_clock() < end) {
        hd_client *c = &clients[chance(CONNECTIONS)];
        if (c->fd < 0) {
            int fd = reach(ntohs(at.sin_port));
            if (!chance(6)) {
                uint8_t noise[300];
                for (unsigned i = 0; i < sizeof noise; i++)
                    noise[i] = (uint8_t)chance(256);
                if (chance(2))
                    memcpy(noise, HD_MAGIC_TEXT, HD_MAGIC);
                if (send(fd, noise, chance(sizeof noise), MSG_NOSIGNAL) >= 0)
                    garbage++;
                close(fd);
                continue;
            }
            if (hd_client_begin(c, fd, key, hd_clock() + 1000000000, NULL) != HD_FINE) {
                hd_client_end(c);
                continue;
            }
            joined++;
            fcntl(c->fd, F_SETFL, O_NONBLOCK);
        }
        if (!chance(25)) {
            hd_client_end(c);
            continue;
        }
        speak(c);
        said++;
        uint8_t heard[65536];
        struct pollfd p = {.fd = c->fd, .events = POLLIN};
        if (chance(4) && poll(&p, 1, (int)chance(3)) > 0 && recv(c->fd, heard, sizeof heard, 0) <= 0)
            hd_client_end(c);
    }
    hd_stats stats;
    hd_server_stats(server, &stats);
    for (int i = 0; i < CONNECTIONS; i += 2)
        hd_client_end(&clients[i]);
    hd_server_stop(server);
    for (int i = 1; i < CONNECTIONS; i += 2)
        hd_client_end(&clients[i]);
    printf("%lu messages, %lu connections, %lu of garbage; the server held %lu keys, dropped %lu\n",
           said, joined, garbage, (unsigned long)stats.keys, (unsigned long)stats.dropped);
    return said == 0;
}
