/* The TCPStore's server and clients of many threads at once: for the sanitizers, and for its promises.
 *
 *   store SEED CLIENTS CALLS
 *
 * Each client adds to one number, sets and reads keys of its own, pushes and pops; some leave in the middle of a
 * call that waits. No addition and no pushed value is lost, and what is read is what was written last. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "harness.h"
#include "hd_client.h"
#include "hd_server.h"

enum { CLIENTS = 32 };

static const uint8_t key[HD_KEY] = "a key that both of them know ...";
static uint64_t seed, calls, wrong, added, pushed, popped;
static int port;

static int enter(hd_client *c)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    hd_client_init(c);
    return connect(fd, (struct sockaddr *)&to, sizeof to) ||
           hd_client_begin(c, fd, key, hd_clock() + 20000000000, NULL) != HD_FINE;
}

static int ask(hd_client *c, int op, const char *name, const void *value, uint64_t size, int64_t number,
               hd_reply *reply)
{
    hd_item items[2] = {{(const uint8_t *)name, strlen(name)}, {value, size}};
    hd_head head = {.op = (uint16_t)op, .items = value ? 2 : 1, .number = number, .wait_ns = 5000000000};
    return hd_client_call(c, &head, items, hd_clock() + 20000000000, NULL, reply);
}

static void fail(const char *what)
{
    fprintf(stderr, "%s\n", what);
    __atomic_add_fetch(&wrong, 1, __ATOMIC_RELAXED);
}

/* Asks for what never comes, and goes. */
static int desert(hd_client *c)
{
    hd_item item = {(const uint8_t *)"never", 5};
    hd_head head = {.op = HD_OP_GET, .items = 1, .wait_ns = 5000000000};
    hd_reply reply;
    (void)hd_client_call(c, &head, &item, hd_clock() + 300000, NULL, &reply);
    hd_client_end(c);
    return enter(c);
}

static void *client(void *arg)
{
    chance luck = chance_of(seed, (uint64_t)(intptr_t)arg);
    char name[32], value[2000];
    uint64_t last = 0, sizes = 0;
    hd_client c;
    hd_reply r;

    snprintf(name, sizeof name, "of %d", (int)(intptr_t)arg);
    if (enter(&c))
        return fail("no connection"), NULL;
    for (uint64_t i = 0; i < calls && !wrong; i++) {
        switch (draw(&luck, 6)) {
        case 0:
            if (ask(&c, HD_OP_ADD, "sum", NULL, 0, (int64_t)(i % 5), &r) || r.head.op != HD_RE_DONE)
                fail("add");
            __atomic_add_fetch(&added, i % 5, __ATOMIC_RELAXED);
            break;
        case 1:
            last = i + 1;
            sizes = sizeof last + draw(&luck, sizeof value - sizeof last);
            memset(value, (int)(i & 255), sizeof value);
            memcpy(value, &last, sizeof last);
            if (ask(&c, HD_OP_SET, name, value, sizes, 0, &r) || r.head.op != HD_RE_DONE)
                fail("set");
            break;
        case 2:
            if (last) {
                hd_item got;
                uint64_t found = 0;
                if (ask(&c, HD_OP_GET, name, NULL, 0, 0, &r) || r.head.items != 1 ||
                    hd_items(r.body, r.head.body, 1, &got) || got.size != sizes)
                    fail("get");
                else
                    memcpy(&found, got.at, sizeof found);
                if (found != last)
                    fail("get: another value");
            }
            break;
        case 3:
            if (ask(&c, HD_OP_PUSH, "queue", &i, sizeof i, 0, &r) || r.head.op != HD_RE_DONE)
                fail("push");
            __atomic_add_fetch(&pushed, 1, __ATOMIC_RELAXED);
            break;
        case 4:
            if (ask(&c, HD_OP_POP, "queue", NULL, 0, 0, &r))
                fail("pop");
            else if (r.head.items)
                __atomic_add_fetch(&popped, 1, __ATOMIC_RELAXED);
            break;
        default:
            if (draw(&luck, 20) == 0 && desert(&c))
                fail("no connection again");
        }
        hd_client_relax(&c);
    }
    hd_client_end(&c);
    return NULL;
}

static void look(void)
{
    hd_client c;
    hd_reply r;
    if (enter(&c) || ask(&c, HD_OP_ADD, "sum", NULL, 0, 0, &r) || r.head.number != (int64_t)added)
        fail("additions are missing");
    if (ask(&c, HD_OP_LENGTH, "queue", NULL, 0, 0, &r) || r.head.number != (int64_t)(pushed - popped))
        fail("values of the queue are missing");
    hd_client_end(&c);
}

int main(int argc, char **argv)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), n;
    hd_limits limits = {.bytes = 64 << 20, .handshake_ns = 20000000000, .message_ns = 20000000000,
                        .idle_ns = 60000000000, .connections = 1000, .strangers = 100, .world_size = -1};
    pthread_t all[CLIENTS];
    hd_server *server;

    if (argc != 4 || (n = atoi(argv[2])) < 1 || n > CLIENTS) {
        fprintf(stderr, "usage: store SEED CLIENTS CALLS\n");
        return 2;
    }
    seed = strtoull(argv[1], NULL, 10);
    calls = strtoull(argv[3], NULL, 10);
    if (bind(listener, (struct sockaddr *)&at, size) || listen(listener, 100) ||
        getsockname(listener, (struct sockaddr *)&at, &size) ||
        !(server = hd_server_start(&listener, 1, key, &limits)))
        return 2;
    port = ntohs(at.sin_port);
    for (int i = 0; i < n; i++)
        pthread_create(&all[i], NULL, client, (void *)(intptr_t)i);
    for (int i = 0; i < n; i++)
        pthread_join(all[i], NULL);
    look();
    hd_server_stop(server);
    printf("%d clients, %llu calls each, sum %llu, %llu pushed, %llu wrong\n", n, (unsigned long long)calls,
           (unsigned long long)added, (unsigned long long)pushed, (unsigned long long)wrong);
    return wrong ? 1 : 0;
}
