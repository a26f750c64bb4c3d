/*
 * Uses the plugin like NCCL does: two ranks, several channels in each direction, groups of receives with tags, many
 * requests at a time, all sizes, every byte verified. Then makes calls that NCCL never makes.
 *
 *     driver PLUGIN VERSION RANK DIRECTORY GROUPS
 *
 * The ranks exchange handles through files in the directory.
 */
#define _GNU_SOURCE
#include "nccl_net.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CHANNELS 4
#define GROUP 8
#define AHEAD 6     /* groups of receives that are posted ahead, on each channel */
#define LARGEST (8u << 20)
#define GUARD 64

static int version, rank;
static void *table, *context;
static unsigned long warnings;
static char last[300];

static void fail(const char *what, long value)
{
    fprintf(stderr, "rank %d, version %d: %s (%ld); last log line: %s\n", rank, version, what, value, last);
    exit(1);
}

#define OK(call) \
    do { \
        int result = (call); \
        if (result != SUCCESS) \
            fail(#call, result); \
    } while (0)
#define IS(code, call) \
    do { \
        int result = (call); \
        if (result != (code)) \
            fail("not " #code ": " #call, result); \
    } while (0)

static void note(int level, unsigned long flags, const char *file, int line, const char *format, ...)
{
    va_list arguments;

    (void)flags, (void)file, (void)line;
    va_start(arguments, format);
    vsnprintf(last, sizeof last, format, arguments);
    va_end(arguments);
    warnings += level == 2;
}

/* Common names for the functions of all versions. */
#define ANY(function, ...) \
    (version == 8    ? ((struct net_v8 *)table)->function(__VA_ARGS__) \
     : version == 9  ? ((struct net_v9 *)table)->function(__VA_ARGS__) \
     : version == 10 ? ((struct net_v10 *)table)->function(__VA_ARGS__) \
     : version == 11 ? ((struct net_v11 *)table)->function(__VA_ARGS__) \
                     : ((struct net_v12 *)table)->function(__VA_ARGS__))

static int net_init(void)
{
    switch (version) {
    case 8: return ((struct net_v8 *)table)->init(note);
    case 9: return ((struct net_v9 *)table)->init(note);
    case 10: return ((struct net_v10 *)table)->init(note, NULL);
    case 11: return ((struct net_v11 *)table)->init(&context, 1, NULL, note, NULL);
    default: return ((struct net_v12 *)table)->init(&context, 1, NULL, note, NULL);
    }
}

static int net_listen(int device, void *handle, void **out)
{
    switch (version) {
    case 8: return ((struct net_v8 *)table)->listen(device, handle, out);
    case 9: return ((struct net_v9 *)table)->listen(device, handle, out);
    case 10: return ((struct net_v10 *)table)->listen(device, handle, out);
    case 11: return ((struct net_v11 *)table)->listen(context, device, handle, out);
    default: return ((struct net_v12 *)table)->listen(context, device, handle, out);
    }
}

static int net_connect(int device, void *handle, void **out)
{
    void *offload = NULL;

    switch (version) {
    case 8: return ((struct net_v8 *)table)->connect(device, handle, out, &offload);
    case 9: return ((struct net_v9 *)table)->connect(device, handle, out, &offload);
    case 10: return ((struct net_v10 *)table)->connect(device, NULL, handle, out, &offload);
    case 11: return ((struct net_v11 *)table)->connect(context, device, handle, out, &offload);
    default: return ((struct net_v12 *)table)->connect(context, device, handle, out, &offload);
    }
}

static int net_isend(void *comm, void *data, size_t size, int tag, void *memory, void **request)
{
    switch (version) {
    case 8: return ((struct net_v8 *)table)->isend(comm, data, (int)size, tag, memory, request);
    case 9: return ((struct net_v9 *)table)->isend(comm, data, size, tag, memory, request);
    case 10: return ((struct net_v10 *)table)->isend(comm, data, size, tag, memory, NULL, request);
    case 11: return ((struct net_v11 *)table)->isend(comm, data, size, tag, memory, NULL, request);
    default: return ((struct net_v12 *)table)->isend(comm, data, size, tag, memory, NULL, request);
    }
}

static int net_irecv(void *comm, int count, void **data, size_t *sizes, int *tags, void **memory, void **request)
{
    int small[GROUP + 1] = {0};

    switch (version) {
    case 8:
        for (int at = 0; sizes && at < count && at < GROUP; at++)
            small[at] = (int)sizes[at];
        return ((struct net_v8 *)table)->irecv(comm, count, data, sizes ? small : NULL, tags, memory, request);
    case 9: return ((struct net_v9 *)table)->irecv(comm, count, data, sizes, tags, memory, request);
    case 10: return ((struct net_v10 *)table)->irecv(comm, count, data, sizes, tags, memory, NULL, request);
    case 11: return ((struct net_v11 *)table)->irecv(comm, count, data, sizes, tags, memory, NULL, request);
    default: return ((struct net_v12 *)table)->irecv(comm, count, data, sizes, tags, memory, NULL, request);
    }
}

static void check_properties(void)
{
    static struct properties_v8 v8;
    static struct properties_v9 v9;
    static struct properties_v11 v11;
    static struct properties_v12 v12;
    int pointers, recvs, speed, count = 1, device = 0;
    size_t most = 1 << 30;

#define TAKE(p) (pointers = (p).ptr_support, recvs = (p).max_recvs, speed = (p).speed)
#define TAKE_MORE(p) (TAKE(p), count = (p).virtual.count, device = (p).virtual.devices[0], most = (p).max_p2p_bytes)
    switch (version) {
    case 8:
        OK(((struct net_v8 *)table)->get_properties(0, &v8));
        TAKE(v8);
        break;
    case 9:
        OK(((struct net_v9 *)table)->get_properties(0, &v9));
        TAKE_MORE(v9);
        break;
    case 10:
        OK(((struct net_v10 *)table)->get_properties(0, &v9));
        TAKE_MORE(v9);
        break;
    case 11:
        OK(((struct net_v11 *)table)->get_properties(0, &v11));
        TAKE_MORE(v11);
        if (v11.max_multi_request_size != 1)
            fail("max_multi_request_size", v11.max_multi_request_size);
        break;
    default:
        OK(((struct net_v12 *)table)->get_properties(0, &v12));
        TAKE_MORE(v12);
        if (v12.max_multi_request_size != 1 || v12.rail_id != -1 || v12.plane_id != -1)
            fail("rail and plane", v12.rail_id);
    }
    if (pointers != PTR_HOST || recvs != GROUP || speed <= 0 || count != 1 || device != 0 || most < 1 << 30)
        fail("properties", recvs);
}

static double now(void)
{
    struct timespec at;

    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + (double)at.tv_nsec / 1e9;
}

/* The message for a receive, as both ranks generate it: a stateless generator. */
static uint64_t mix(uint64_t value)
{
    value = (value ^ (value >> 31)) * UINT64_C(0x7fb5d329728ea185);
    value = (value ^ (value >> 27)) * UINT64_C(0x81dadef4bc2dd44d);
    return value ^ (value >> 33);
}

static uint64_t chance(int from, int channel, unsigned group, unsigned at, unsigned what)
{
    return mix(mix(mix(((uint64_t)from << 8 | (unsigned)channel) + 1) + group) + ((uint64_t)at << 32 | what));
}

static unsigned members(int from, int channel, unsigned group)
{
    static const unsigned counts[] = {1, 1, 2, 3, GROUP};

    return counts[chance(from, channel, group, 0, 1) % 5];
}

/* Length of a send. Few are large. */
static size_t length(int from, int channel, unsigned group, unsigned at)
{
    static const size_t lengths[] = {0, 1, 8, 4095, 4096, 4097, 32743, 32744, 32768, 65536, 100000, 262144};
    uint64_t number = chance(from, channel, group, at, 2);

    if (group % 29 == 7 && at == 0)
        return number % 2 ? LARGEST : (1u << 20) + number % 5 - 2;
    return number % 3 ? lengths[number / 3 % 12] : number / 3 % 40000;
}

/* Tags differ within a group, and repeat in the next one. */
static int tag(int from, int channel, unsigned group, unsigned at)
{
    return (int)((at * 3 + chance(from, channel, group, 0, 3)) % 64) - 5;
}

static void fill(unsigned char *bytes, size_t size, uint64_t seed)
{
    uint64_t value = mix(seed + 99);

    for (size_t at = 0; at < size; at += 8) {
        value += UINT64_C(0x9e3779b97f4a7c15);
        memcpy(bytes + at, &value, size - at < 8 ? size - at : 8);
    }
}

struct receive {
    void *request;
    unsigned group;
    unsigned char *data[GROUP];
    size_t room[GROUP];
};

struct send {
    void *request;
    unsigned char *data;
    size_t size;
};

struct channel {
    void *listener, *sender, *receiver;
    unsigned char mine[HANDLE_MAX], other[HANDLE_MAX];
    /* Sends: those of a group are posted in another order. */
    unsigned send_group, send_next, sends_open;
    struct send sends[32];
    /* Receives. */
    unsigned receive_group, received_groups;
    struct receive receives[AHEAD];
};

static void *allocate(size_t size)
{
    void *memory = malloc(size);

    if (!memory)
        fail("memory", (long)size);
    return memory;
}

static int start_receives(struct channel *channel, int number, unsigned groups)
{
    int peer = 1 - rank, any = 0;

    for (int at = 0; at < AHEAD && channel->receive_group < groups; at++) {
        struct receive *receive = &channel->receives[at];
        unsigned group = channel->receive_group, count = members(peer, number, group);
        void *data[GROUP], *memory[GROUP];
        int tags[GROUP];

        if (receive->request)
            continue;
        for (unsigned one = 0; one < count; one++) {
            size_t size = length(peer, number, group, one);

            /* As much as will arrive; or more; or, as in some of NCCL's protocols, less. */
            receive->room[one] = group % 5 == 1 ? size + 1000 : group % 5 == 2 ? size - size / 4 : size;
            receive->data[one] = allocate(receive->room[one] + GUARD);
            memset(receive->data[one], 0xee, receive->room[one] + GUARD);
            data[one] = receive->data[one];
            tags[one] = tag(peer, number, group, one);
            OK(ANY(reg_mr, channel->receiver, data[one], receive->room[one], PTR_HOST, &memory[one]));
        }
        OK(net_irecv(channel->receiver, (int)count, data, receive->room, tags, memory, &receive->request));
        for (unsigned one = 0; one < count; one++)
            OK(ANY(dereg_mr, channel->receiver, memory[one]));
        if (!receive->request) {
            for (unsigned one = 0; one < count; one++)
                free(receive->data[one]);
            break;
        }
        receive->group = group;
        channel->receive_group++;
        any = 1;
    }
    return any;
}

static int finish_receives(struct channel *channel, int number)
{
    int peer = 1 - rank, any = 0;

    for (int at = 0; at < AHEAD; at++) {
        struct receive *receive = &channel->receives[at];
        int done = -1, sizes[GROUP];
        unsigned count;
        void *flush = receive;

        if (!receive->request)
            continue;
        OK(ANY(test, receive->request, &done, sizes));
        if (!done)
            continue;
        count = members(peer, number, receive->group);
        for (unsigned one = 0; one < count; one++) {
            size_t sent = length(peer, number, receive->group, one);
            size_t size = sent < receive->room[one] ? sent : receive->room[one];
            unsigned char *expected = allocate(sent + 8);

            fill(expected, sent, chance(peer, number, receive->group, one, 4));
            if ((size_t)sizes[one] != size)
                fail("size", sizes[one]);
            if (memcmp(expected, receive->data[one], size) != 0)
                fail("bytes of group", receive->group);
            for (size_t beyond = size; beyond < receive->room[one] + GUARD; beyond++)
                if (receive->data[one][beyond] != 0xee)
                    fail("a byte after the message was changed", (long)beyond);
            free(expected);
        }
        OK(ANY(iflush, channel->receiver, (int)count, (void **)receive->data, sizes, NULL, &flush));
        if (flush)
            fail("a flush of the host's memory", 0);
        IS(INVALID_ARGUMENT, ANY(test, receive->request, &done, sizes));
        for (unsigned one = 0; one < count; one++)
            free(receive->data[one]);
        receive->request = NULL;
        channel->received_groups++;
        any = 1;
    }
    return any;
}

static int start_sends(struct channel *channel, int number, unsigned groups)
{
    int any = 0;

    for (int at = 0; at < 32 && channel->send_group < groups; at++) {
        struct send *send = &channel->sends[at];
        unsigned group = channel->send_group, count = members(rank, number, group), one;
        void *memory;

        if (send->request)
            continue;
        /* In reverse order, or starting in the middle. */
        one = group % 2 ? count - 1 - channel->send_next : (channel->send_next + count / 2) % count;
        if (!send->data) {
            send->size = length(rank, number, group, one);
            send->data = allocate(send->size + 1);
            fill(send->data, send->size, chance(rank, number, group, one, 4));
        }
        OK(ANY(reg_mr, channel->sender, send->data, send->size, PTR_HOST, &memory));
        OK(net_isend(channel->sender, send->data, send->size, tag(rank, number, group, one), memory, &send->request));
        OK(ANY(dereg_mr, channel->sender, memory));
        if (!send->request) {
            /* The peer has no receive for it yet: retry later. */
            free(send->data);
            send->data = NULL;
            break;
        }
        any = 1;
        if (++channel->send_next == count) {
            channel->send_next = 0;
            channel->send_group++;
        }
    }
    return any;
}

static int finish_sends(struct channel *channel)
{
    int any = 0;

    channel->sends_open = 0;
    for (int at = 0; at < 32; at++) {
        struct send *send = &channel->sends[at];
        int done = -1, size = -1;

        if (!send->request)
            continue;
        OK(ANY(test, send->request, &done, at % 2 ? &size : NULL));
        if (!done) {
            channel->sends_open++;
            continue;
        }
        if (at % 2 && (size < 0 || (size_t)size > send->size))
            fail("bytes sent", size);
        /* The application may use the memory again. */
        memset(send->data, 0xdd, send->size);
        free(send->data);
        send->data = NULL;
        send->request = NULL;
        any = 1;
    }
    return any;
}

static void exchange(const char *directory, struct channel *channels)
{
    char path[500], ready[520];
    double until = now() + 60;
    FILE *file;

    snprintf(path, sizeof path, "%s/handles-%d-%d", directory, version, rank);
    snprintf(ready, sizeof ready, "%s.new", path);
    file = fopen(ready, "wb");
    for (int at = 0; file && at < CHANNELS; at++)
        fwrite(channels[at].mine, HANDLE_MAX, 1, file);
    if (!file || fclose(file) != 0 || rename(ready, path) != 0)
        fail("cannot write handles", 0);
    snprintf(path, sizeof path, "%s/handles-%d-%d", directory, version, 1 - rank);
    while (!(file = fopen(path, "rb"))) {
        if (now() > until)
            fail("no handles of the other rank", 0);
        usleep(1000);
    }
    for (int at = 0; at < CHANNELS; at++)
        if (fread(channels[at].other, HANDLE_MAX, 1, file) != 1)
            fail("cannot read handles", at);
    fclose(file);
}

/* Calls that NCCL never makes: they are refused without side effects. */
static void nonsense(struct channel *channel)
{
    static const uint64_t numbers[] = {1, 7, 0xdeadbeef, UINT64_MAX, UINT64_C(1) << 60, UINT64_C(2) << 60,
                                       UINT64_C(3) << 60, UINT64_C(0x4fff000000000000), UINT64_C(0x400000001ff00005)};
    unsigned char handle[HANDLE_MAX] = {0}, byte = 0;
    void *out = NULL, *data[GROUP + 1] = {&byte};
    size_t sizes[GROUP + 1] = {1};
    int tags[GROUP + 1] = {0}, done, count;
    unsigned long before = warnings;

    IS(INVALID_ARGUMENT, ANY(devices, NULL));
    OK(ANY(devices, &count));
    for (unsigned at = 0; at < sizeof numbers / sizeof *numbers; at++) {
        void *wild = (void *)(uintptr_t)numbers[at];

        IS(INVALID_ARGUMENT, ANY(test, wild, &done, NULL));
        IS(INVALID_ARGUMENT, net_isend(wild, &byte, 1, 0, NULL, &out));
        IS(INVALID_ARGUMENT, net_irecv(wild, 1, data, sizes, tags, NULL, &out));
        IS(INVALID_ARGUMENT, ANY(accept, wild, &out, NULL));
        IS(INVALID_ARGUMENT, ANY(close_send, wild));
        IS(INVALID_ARGUMENT, ANY(close_recv, wild));
        IS(INVALID_ARGUMENT, ANY(close_listen, wild));
        IS(INVALID_ARGUMENT, ANY(iflush, (void *)((uintptr_t)wild | 1u << 20), 1, data, tags, NULL, NULL));
    }
    IS(INVALID_ARGUMENT, ANY(test, NULL, &done, NULL));
    IS(INVALID_ARGUMENT, ANY(close_send, channel->receiver));
    IS(INVALID_ARGUMENT, ANY(close_recv, channel->sender));
    IS(INVALID_ARGUMENT, ANY(reg_mr, channel->sender, &byte, 1, PTR_CUDA, &out));
    IS(INVALID_ARGUMENT, ANY(reg_mr, channel->sender, &byte, 1, -1, &out));
    IS(INVALID_ARGUMENT, ANY(reg_mr, channel->sender, NULL, 1, PTR_HOST, &out));
    IS(INVALID_ARGUMENT, ANY(reg_mr, channel->sender, &byte, 1, PTR_HOST, NULL));
    IS(INVALID_ARGUMENT, ANY(dereg_mr, channel->sender, &byte));
    IS(INVALID_ARGUMENT, net_isend(channel->sender, NULL, 1, 0, NULL, &out));
    IS(INVALID_ARGUMENT, net_isend(channel->sender, &byte, 1, 0, NULL, NULL));
    IS(INVALID_ARGUMENT, net_isend(channel->sender, &byte, version == 8 ? (size_t)-1 : SIZE_MAX / 2, 0, NULL, &out));
    IS(INVALID_ARGUMENT, net_isend(channel->receiver, &byte, 1, 0, NULL, &out));
    IS(INVALID_ARGUMENT, net_irecv(channel->sender, 1, data, sizes, tags, NULL, &out));
    IS(INVALID_ARGUMENT, net_irecv(channel->receiver, 0, data, sizes, tags, NULL, &out));
    IS(INVALID_ARGUMENT, net_irecv(channel->receiver, -1, data, sizes, tags, NULL, &out));
    IS(INVALID_ARGUMENT, net_irecv(channel->receiver, GROUP + 1, data, sizes, tags, NULL, &out));
    IS(INVALID_ARGUMENT, net_irecv(channel->receiver, 1, NULL, sizes, tags, NULL, &out));
    IS(INVALID_ARGUMENT, net_irecv(channel->receiver, 1, data, NULL, tags, NULL, &out));
    IS(INVALID_ARGUMENT, net_irecv(channel->receiver, 1, data, sizes, NULL, NULL, &out));
    IS(INVALID_ARGUMENT, net_irecv(channel->receiver, 1, data, sizes, tags, NULL, NULL));
    sizes[0] = SIZE_MAX;
    IS(INVALID_ARGUMENT, net_irecv(channel->receiver, 1, data, sizes, tags, NULL, &out));
    IS(INVALID_ARGUMENT, net_listen(count, handle, &out));
    IS(INVALID_ARGUMENT, net_listen(-1, handle, &out));
    IS(INVALID_ARGUMENT, net_listen(0, NULL, &out));
    IS(INVALID_ARGUMENT, net_connect(0, NULL, &out));
    IS(INVALID_ARGUMENT, net_connect(0, handle, &out));
    /* A handle of a connection that is not being set up in this process. */
    memcpy(handle, channel->mine, HANDLE_MAX);
    memset(handle + 40, 0x70, 16);
    IS(INVALID_ARGUMENT, net_connect(0, handle, &out));
    if (out)
        fail("an invalid call returned an object", 0);
    if (warnings < before + 50)
        fail("lines in the log", (long)(warnings - before));
}

int main(int argc, char **argv)
{
    static struct channel channels[CHANNELS];
    unsigned groups, open;
    char symbol[40], path[500];
    FILE *mark;
    void *library, *request = NULL;
    int count = 0, done, left;
    double began, until;
    uint64_t bytes = 0;

    if (argc != 6) {
        fprintf(stderr, "usage: driver PLUGIN VERSION RANK DIRECTORY GROUPS\n");
        return 2;
    }
    version = atoi(argv[2]);
    rank = atoi(argv[3]);
    groups = (unsigned)atoi(argv[5]);
    library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!library)
        fail(dlerror(), 0);
    snprintf(symbol, sizeof symbol, "ncclNetPlugin_v%d", version);
    table = dlsym(library, symbol);
    if (!table)
        fail(symbol, 0);

    /* Calls before init fail. */
    IS(INVALID_USAGE, ANY(devices, &count));
    IS(INVALID_ARGUMENT, ANY(test, &count, &done, NULL));
    OK(net_init());
    OK(net_init());
    OK(ANY(devices, &count));
    if (count != 1 || strcmp(*(const char **)table, "Bifrost") != 0)
        fail("devices", count);
    check_properties();

    for (int at = 0; at < CHANNELS; at++)
        OK(net_listen(0, channels[at].mine, &channels[at].listener));
    exchange(argv[4], channels);
    /* Neither call may block, because one thread makes both. */
    until = now() + 60;
    do {
        left = 0;
        for (int at = 0; at < CHANNELS; at++) {
            struct channel *channel = &channels[at];

            if (!channel->sender)
                OK(net_connect(0, channel->other, &channel->sender));
            if (!channel->receiver)
                OK(ANY(accept, channel->listener, &channel->receiver, NULL));
            left += !channel->sender + !channel->receiver;
        }
        if (now() > until)
            fail("connections", left);
    } while (left > 0);
    for (int at = 0; at < CHANNELS; at++)
        OK(ANY(close_listen, channels[at].listener));

    if (warnings)
        fail("warnings", (long)warnings);
    nonsense(&channels[0]);
    warnings = 0;

    /* A send without a receive must not begin. */
    OK(net_isend(channels[0].sender, &count, sizeof count, 4711, NULL, &request));
    if (request)
        fail("a send without a receive has begun", 0);

    snprintf(path, sizeof path, "%s/connected-%d", argv[4], rank);
    mark = fopen(path, "w");
    if (!mark || fclose(mark) != 0)
        fail(path, 0);
    began = now();
    until = began + 120;
    do {
        open = 0;
        for (int at = 0; at < CHANNELS; at++) {
            struct channel *channel = &channels[at];

            start_receives(channel, at, groups);
            start_sends(channel, at, groups);
            finish_receives(channel, at);
            finish_sends(channel);
            open += channel->sends_open + (channel->send_group < groups) + (channel->received_groups < groups);
        }
        /* NCCL computes without calls for longer than a silent peer is tolerated: connections must survive. */
        if (getenv("DRIVER_PAUSE") && rank == 0 && channels[0].received_groups == groups / 2) {
            unsetenv("DRIVER_PAUSE");
            sleep(4);
        }
        if (now() > until)
            fail("groups done", channels[0].received_groups);
    } while (open > 0);
    for (int at = 0; at < CHANNELS; at++)
        for (unsigned group = 0; group < groups; group++)
            for (unsigned one = 0; one < members(rank, at, group); one++)
                bytes += length(rank, at, group, one);
    printf("rank %d, version %d: %u groups, %.1f MB in %.2f s\n", rank, version, CHANNELS * groups, (double)bytes / 1e6,
           now() - began);

    /* The last data arrives although the connection is closed and the process ends. */
    for (int at = 0; at < CHANNELS; at++) {
        OK(ANY(close_send, channels[at].sender));
        IS(INVALID_ARGUMENT, ANY(close_send, channels[at].sender));
    }
    for (int at = 0; at < CHANNELS; at++) {
        OK(ANY(close_recv, channels[at].receiver));
        IS(INVALID_ARGUMENT, net_irecv(channels[at].receiver, 1, NULL, NULL, NULL, NULL, &request));
    }
    if (version >= 11)
        OK(version == 11 ? ((struct net_v11 *)table)->finalize(context) : ((struct net_v12 *)table)->finalize(context));
    /* The plugin's thread may still be running, so its code must stay loaded. */
    dlclose(library);
    usleep(20000);
    return 0;
}
