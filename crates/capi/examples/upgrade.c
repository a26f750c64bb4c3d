/*
 * One process that loads two versions of the library, and moves its calls from one to the other while running.
 *
 *     cc -std=c11 upgrade.c -o upgrade $(pkg-config --cflags bifrost-rdm) -ldl
 *     ./upgrade serve OLD.so NEW.so ::1                          prints two ports
 *     ./upgrade ask OLD.so NEW.so ::1 ::1 PORT PORT 10 32768     calls of 32 KiB for 10 s; kill -USR1 moves them
 *
 * Each library is loaded from its own file, with RTLD_LOCAL, and has its own worker and connection. Calls begun with one
 * complete with it; calls begun after the signal use the other. So no call is lost or duplicated. While the last calls of
 * the first library are open, the calls of the two are not ordered.
 */
#define _POSIX_C_SOURCE 200809L
#include <bifrost_rdm.h>

#include <dlfcn.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SECOND UINT64_C(1000000)
#define OPEN 64
#define NUMBERS (1u << 24)

/* The functions used, with their names in the header. */
#define FUNCTIONS(F) \
    F(abi) F(version) F(last_error) F(config_init) F(worker_new) F(worker_free) F(poll) F(descriptor) F(due) F(listen) \
    F(listener_port) F(listener_close) F(accept) F(connect) F(close) F(begin_call) F(finish) F(next_request) F(respond) F(release)

struct library {
#define FUNCTION(name) __typeof__(bifrost_rdm_##name) *name;
    FUNCTIONS(FUNCTION)
#undef FUNCTION
    bifrost_rdm_worker *worker;
    bifrost_rdm_listener *listener;
    bifrost_rdm_endpoint *endpoint;
    int file;
    unsigned calls;
};

struct call {
    struct library *library;
    uint32_t id;
    uint64_t number;
};

static volatile sig_atomic_t flips;

static void on_signal(int number)
{
    (void)number;
    flips++;
}

static void fail(const char *what)
{
    fprintf(stderr, "upgrade: %s\n", what);
    exit(1);
}

static void check(const struct library *library, bifrost_rdm_status status, const char *what)
{
    if (status != BIFROST_RDM_STATUS_OK) {
        fprintf(stderr, "upgrade: %s: %s\n", what, library->last_error());
        exit(1);
    }
}

static void load(struct library *library, const char *path, const char *address)
{
    bifrost_rdm_config config;
    void *object = dlopen(path, RTLD_NOW | RTLD_LOCAL);

    if (!object)
        fail(dlerror());
#define FUNCTION(name) \
    *(void **)&library->name = dlsym(object, "bifrost_rdm_" #name); \
    if (!library->name) \
        fail("a library lacks bifrost_rdm_" #name);
    FUNCTIONS(FUNCTION)
#undef FUNCTION
    /* Fails if the library has another version of the structure. */
    check(library, library->config_init(&config, sizeof config), "config");
    config.port = 0; /* each has its own port */
    check(library, library->worker_new(address, &config, &library->worker), "worker");
    check(library, library->descriptor(library->worker, &library->file), "descriptor");
    fprintf(stderr, "upgrade: %s: version %s, interface %u\n", path, library->version(), library->abi());
}

static double now_us(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

/* Handles whatever is due in both. */
static void turn(struct library libraries[2])
{
    for (int at = 0; at < 2; at++) {
        int32_t busy;

        do
            check(&libraries[at], libraries[at].poll(libraries[at].worker, &busy), "poll");
        while (busy);
    }
}

/* Sleeps until a packet arrives for either, or something is due. */
static void sleep_until_due(struct library libraries[2])
{
    struct pollfd ready[2];
    uint64_t due, first = SECOND;

    for (int at = 0; at < 2; at++) {
        ready[at] = (struct pollfd){libraries[at].file, POLLIN, 0};
        check(&libraries[at], libraries[at].due(libraries[at].worker, &due), "due");
        first = due < first ? due : first;
    }
    poll(ready, 2, (int)(first / 1000));
}

/* Answers one request, if there is one. Returns whether the peer has ended. */
static int answer(struct library *library, unsigned char *seen, unsigned *twice, unsigned *all)
{
    bifrost_rdm_message request;
    bifrost_rdm_status status = library->next_request(library->endpoint, 0, &request);
    uint64_t number;

    if (status == BIFROST_RDM_STATUS_CLOSED)
        return 1;
    if (status == BIFROST_RDM_STATUS_TIMEOUT)
        return 0;
    check(library, status, "next request");
    if (request.len < sizeof number)
        fail("a request is too short");
    memcpy(&number, request.data, sizeof number);
    if (number >= NUMBERS)
        fail("the number of a request is out of range");
    *twice += seen[number];
    seen[number] = 1;
    *all += 1;
    check(library, library->respond(library->endpoint, &request, request.data, request.len), "respond");
    check(library, library->release(library->worker, &request), "release");
    return 0;
}

static void serve(struct library libraries[2], const char *address)
{
    unsigned char *seen = calloc(NUMBERS, 1);
    unsigned twice = 0, all = 0;
    uint16_t port;

    if (!seen)
        fail("out of memory");
    for (int at = 0; at < 2; at++) {
        check(&libraries[at], libraries[at].listen(libraries[at].worker, address, 0, &libraries[at].listener), "listen");
        check(&libraries[at], libraries[at].listener_port(libraries[at].listener, &port), "port");
        printf("%u ", (unsigned)port);
    }
    printf("\n");
    fflush(stdout);
    for (int at = 0; at < 2; at++) {
        struct library *library = &libraries[at];

        while (!library->endpoint) {
            bifrost_rdm_status status = library->accept(library->listener, 0, &library->endpoint);

            turn(libraries);
            if (status != BIFROST_RDM_STATUS_TIMEOUT)
                check(library, status, "accept");
        }
        check(library, library->listener_close(library->listener), "close the listener");
    }
    for (int ended[2] = {0, 0}; !ended[0] || !ended[1];) {
        unsigned before = all;

        turn(libraries);
        for (int at = 0; at < 2; at++)
            ended[at] = ended[at] || answer(&libraries[at], seen, &twice, &all);
        if (all == before)
            sleep_until_due(libraries);
    }
    printf("%u requests, %u duplicates\n", all, twice);
    free(seen);
}

/* Takes the response to a call, if it has arrived. */
static int finished(struct call *call, size_t len)
{
    bifrost_rdm_message message;
    struct library *library = call->library;
    bifrost_rdm_status status = library->finish(library->endpoint, call->id, 0, &message);

    if (status == BIFROST_RDM_STATUS_TIMEOUT)
        return 0;
    check(library, status, "finish");
    if (message.len != len || memcmp(message.data, &call->number, sizeof call->number) != 0)
        fail("a response belongs to another call");
    check(library, library->release(library->worker, &message), "release");
    return 1;
}

static void ask(struct library libraries[2], const char *peer, char **ports, unsigned seconds, size_t len)
{
    struct call open[OPEN];
    unsigned count = 0;
    uint64_t number = 0;
    unsigned char *bytes = calloc(len, 1);
    double began, last, now, pause = 0;

    if (!bytes || len < sizeof number)
        fail("BYTES must be at least 8");
    for (int at = 0; at < 2; at++) {
        uint16_t port = (uint16_t)strtoul(ports[at], NULL, 10);

        check(&libraries[at], libraries[at].connect(libraries[at].worker, peer, port, 10 * SECOND, &libraries[at].endpoint),
              "connect");
    }
    printf("connected\n");
    fflush(stdout);
    began = last = now_us();
    while ((now = now_us()) < began + seconds * 1e6 || count > 0) {
        int any = 0;

        turn(libraries);
        while (count < OPEN && now < began + seconds * 1e6 && number < NUMBERS) {
            struct library *library = &libraries[flips % 2];
            struct call *call = &open[count++];

            call->library = library;
            call->number = number++;
            memcpy(bytes, &call->number, sizeof call->number);
            check(library, library->begin_call(library->endpoint, bytes, len, &call->id), "call");
            library->calls++;
        }
        for (unsigned at = 0; at < count;) {
            if (finished(&open[at], len)) {
                open[at] = open[--count];
                any = 1;
            } else {
                at++;
            }
        }
        now = now_us();
        if (any) {
            pause = now - last > pause ? now - last : pause;
            last = now;
        } else {
            sleep_until_due(libraries);
        }
        if (now - last > 10e6)
            fail("no response for 10 s");
    }
    printf("%llu calls, first library %u, second %u; moved %d times; longest pause %.1f ms\n",
           (unsigned long long)number, libraries[0].calls, libraries[1].calls, (int)flips, pause / 1e3);
    free(bytes);
}

int main(int argc, char **argv)
{
    static struct library libraries[2];
    struct sigaction action = {.sa_handler = on_signal};
    int serves = argc == 5 && strcmp(argv[1], "serve") == 0;

    if (!serves && !(argc == 10 && strcmp(argv[1], "ask") == 0)) {
        fprintf(stderr, "usage: upgrade serve OLD NEW ADDRESS | upgrade ask OLD NEW ADDRESS PEER PORT PORT SECONDS BYTES\n");
        return 2;
    }
    sigaction(SIGUSR1, &action, NULL);
    for (int at = 0; at < 2; at++)
        load(&libraries[at], argv[2 + at], argv[4]);
    if (libraries[0].poll == libraries[1].poll)
        fail("both are the same library: use two files");
    if (serves)
        serve(libraries, argv[4]);
    else
        ask(libraries, argv[5], argv + 6, (unsigned)strtoul(argv[8], NULL, 10), strtoul(argv[9], NULL, 10));
    for (int at = 0; at < 2; at++) {
        check(&libraries[at], libraries[at].close(libraries[at].endpoint), "close");
        check(&libraries[at], libraries[at].worker_free(libraries[at].worker), "free");
    }
    return 0;
}
