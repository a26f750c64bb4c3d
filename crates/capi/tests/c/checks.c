/* Invalid arguments, concurrent threads, and peers that end. */
#define _POSIX_C_SOURCE 200809L
#include <bifrost_rdm.h>

#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SECOND UINT64_C(1000000)

#define EXPECT(expected, call) \
    do { \
        bifrost_rdm_status got = (call); \
        if (got != BIFROST_RDM_STATUS_##expected) { \
            fprintf(stderr, "line %d: %s is %d: %s\n", __LINE__, #call, (int)got, bifrost_rdm_last_error()); \
            exit(1); \
        } \
    } while (0)
#define TRUE(what) \
    do { \
        if (!(what)) { \
            fprintf(stderr, "line %d: false: %s (%s)\n", __LINE__, #what, bifrost_rdm_last_error()); \
            exit(1); \
        } \
    } while (0)

static bifrost_rdm_worker *new_worker(void)
{
    bifrost_rdm_config config;
    bifrost_rdm_worker *worker;

    EXPECT(OK, bifrost_rdm_config_init(&config, sizeof config));
    config.port = 0;
    config.service = BIFROST_RDM_SERVICE_BOTH;
    EXPECT(OK, bifrost_rdm_worker_new("::1", &config, &worker));
    return worker;
}

static void configurations(void)
{
    bifrost_rdm_config good, config;
    bifrost_rdm_worker *worker = NULL;

    EXPECT(INVALID, bifrost_rdm_config_init(NULL, sizeof good));
    EXPECT(INVALID, bifrost_rdm_config_init(&good, 1));
    EXPECT(OK, bifrost_rdm_config_init(&good, sizeof good));
    TRUE(good.size == sizeof good && good.mtu == 1024 && good.port == 4791);
    good.port = 0;
    EXPECT(INVALID, bifrost_rdm_worker_new(NULL, &good, &worker));
    EXPECT(INVALID, bifrost_rdm_worker_new("not an address", &good, &worker));
    TRUE(strstr(bifrost_rdm_last_error(), "not an address"));
    EXPECT(INVALID, bifrost_rdm_worker_new("::1", &good, NULL));
    EXPECT(BIND, bifrost_rdm_worker_new("2001:db8::1", &good, &worker));
    /* Each field, with invalid values. */
#define REFUSED(field, value, status) \
    config = good; \
    config.field = (value); \
    EXPECT(status, bifrost_rdm_worker_new("::1", &config, &worker)); \
    TRUE(strstr(bifrost_rdm_last_error(), #field) != NULL)
    REFUSED(size, 0, INVALID);
    REFUSED(size, 4096, INVALID);
    REFUSED(provider, 3, INVALID);
    /* No RDMA NIC has the loopback address. */
    config = good;
    config.provider = BIFROST_RDM_PROVIDER_VERBS;
    EXPECT(UNSUPPORTED, bifrost_rdm_worker_new("::1", &config, &worker));
    TRUE(strstr(bifrost_rdm_last_error(), "RDMA NIC") != NULL);
    REFUSED(service, 0, INVALID);
    REFUSED(service, UINT32_MAX, INVALID);
    REFUSED(mtu, 1500, INVALID);
    REFUSED(order, 2, INVALID);
    REFUSED(port, 65536, INVALID);
    REFUSED(window, 0, INVALID);
    REFUSED(window, 1025, INVALID);
    REFUSED(longest, 0, INVALID);
    REFUSED(longest, UINT32_MAX, INVALID);
    REFUSED(connections, 0, INVALID);
    REFUSED(connections, UINT32_MAX, INVALID);
    REFUSED(queue_us, 0, INVALID);
    REFUSED(patience_us, UINT32_MAX, INVALID);
    REFUSED(spin_us, UINT32_MAX, INVALID);
    TRUE(worker == NULL);
}

static void texts(void)
{
    TRUE(bifrost_rdm_abi() == BIFROST_RDM_ABI);
    TRUE(strlen(bifrost_rdm_version()) > 2);
    for (int status = -3; status < 40; status++)
        TRUE(strlen(bifrost_rdm_status_text(status)) > 2);
    TRUE(strcmp(bifrost_rdm_status_text(BIFROST_RDM_STATUS_BROKEN), bifrost_rdm_status_text(99)) != 0);
}

static void nulls(void)
{
    bifrost_rdm_message message = {NULL, 0, 0};
    bifrost_rdm_remote remote;
    size_t count;
    uint32_t call;

    EXPECT(OK, bifrost_rdm_worker_free(NULL));
    EXPECT(OK, bifrost_rdm_close(NULL));
    EXPECT(OK, bifrost_rdm_listener_close(NULL));
    EXPECT(OK, bifrost_rdm_deregister(NULL));
    EXPECT(INVALID, bifrost_rdm_poll(NULL, NULL));
    EXPECT(INVALID, bifrost_rdm_wait(NULL, 0));
    EXPECT(INVALID, bifrost_rdm_descriptor(NULL, NULL));
    EXPECT(INVALID, bifrost_rdm_due(NULL, NULL));
    EXPECT(INVALID, bifrost_rdm_listen(NULL, "::1", 0, NULL));
    EXPECT(INVALID, bifrost_rdm_accept(NULL, 0, NULL));
    EXPECT(INVALID, bifrost_rdm_connect(NULL, "::1", 1, 0, NULL));
    EXPECT(INVALID, bifrost_rdm_send(NULL, "x", 1, 0));
    EXPECT(INVALID, bifrost_rdm_recv(NULL, 0, &message));
    EXPECT(INVALID, bifrost_rdm_call(NULL, "x", 1, 0, &message));
    EXPECT(INVALID, bifrost_rdm_begin_call(NULL, "x", 1, &call));
    EXPECT(INVALID, bifrost_rdm_finish(NULL, 0, 0, &message));
    EXPECT(INVALID, bifrost_rdm_forget(NULL, 0));
    EXPECT(INVALID, bifrost_rdm_next_request(NULL, 0, &message));
    EXPECT(INVALID, bifrost_rdm_respond(NULL, &message, "x", 1));
    EXPECT(INVALID, bifrost_rdm_refuse(NULL, &message, "x"));
    EXPECT(INVALID, bifrost_rdm_release(NULL, &message));
    EXPECT(INVALID, bifrost_rdm_open_messages(NULL, &count));
    EXPECT(INVALID, bifrost_rdm_register(NULL, 1, NULL));
    EXPECT(INVALID, bifrost_rdm_region_allow(NULL, NULL, 1, &remote));
    EXPECT(INVALID, bifrost_rdm_remote_encode(NULL, NULL));
    EXPECT(INVALID, bifrost_rdm_remote_decode(NULL, NULL));
}

static void turn(bifrost_rdm_worker *worker)
{
    EXPECT(OK, bifrost_rdm_poll(worker, NULL));
}

struct accepting {
    bifrost_rdm_listener *listener;
    bifrost_rdm_endpoint *endpoint;
};

static void *accept_one(void *argument)
{
    struct accepting *accepting = argument;

    EXPECT(OK, bifrost_rdm_accept(accepting->listener, 60 * SECOND, &accepting->endpoint));
    return NULL;
}

static void *receive_one(void *endpoint)
{
    bifrost_rdm_message message;
    bifrost_rdm_status status;

    /* The other thread may be calling, too. */
    while ((status = bifrost_rdm_recv(endpoint, 60 * SECOND, &message)) == BIFROST_RDM_STATUS_BUSY)
        ;
    TRUE(status == BIFROST_RDM_STATUS_OK);
    return NULL;
}

static void connections(void)
{
    bifrost_rdm_worker *one = new_worker(), *two = new_worker();
    struct accepting accepting = {NULL, NULL};
    bifrost_rdm_endpoint *endpoint, *other;
    bifrost_rdm_listener *listener;
    bifrost_rdm_message message = {NULL, 0, 0}, request = {NULL, 0, 0}, stale;
    bifrost_rdm_measured_data measured;
    char path[] = "/tmp/bifrost-checks-XXXXXX";
    int file;
    bifrost_rdm_region *region;
    bifrost_rdm_remote remote, decoded;
    bifrost_rdm_status status;
    unsigned char bytes[64];
    char text[100];
    pthread_t thread;
    uint16_t port;
    uint64_t due;
    uint32_t call, second;
    size_t count;
    int descriptor, again, busy;

    EXPECT(OK, bifrost_rdm_listen(two, "::1", 0, &listener));
    EXPECT(BIND, bifrost_rdm_listen(two, "2001:db8::1", 0, &accepting.listener));
    EXPECT(OK, bifrost_rdm_listener_port(listener, &port));
    EXPECT(TIMEOUT, bifrost_rdm_accept(listener, 1000, &other));
    /* One thread per worker: the other end connects concurrently. */
    accepting.listener = listener;
    TRUE(pthread_create(&thread, NULL, accept_one, &accepting) == 0);
    EXPECT(OK, bifrost_rdm_connect(one, "::1", port, 60 * SECOND, &endpoint));
    TRUE(pthread_join(thread, NULL) == 0);
    other = accepting.endpoint;
    EXPECT(OK, bifrost_rdm_listener_close(listener));
    status = bifrost_rdm_connect(one, "::1", port, SECOND, &accepting.endpoint);
    TRUE(status == BIFROST_RDM_STATUS_UNREACHABLE);
    TRUE(strstr(bifrost_rdm_last_error(), "::1"));

    /* Two threads call one worker: the second gets BUSY immediately, and can retry. */
    TRUE(pthread_create(&thread, NULL, receive_one, endpoint) == 0);
    while (bifrost_rdm_open_messages(endpoint, &count) != BIFROST_RDM_STATUS_BUSY)
        ;
    EXPECT(BUSY, bifrost_rdm_send(endpoint, "x", 1, 0));
    EXPECT(BUSY, bifrost_rdm_close(endpoint));
    EXPECT(BUSY, bifrost_rdm_worker_free(one));
    EXPECT(OK, bifrost_rdm_send(other, "go", 2, 0));
    TRUE(pthread_join(thread, NULL) == 0);
    EXPECT(OK, bifrost_rdm_open_messages(endpoint, &count));
    TRUE(count == 0);

    /* Messages: empty, too long, and released twice. */
    EXPECT(INVALID, bifrost_rdm_send(endpoint, NULL, 1, 0));
    EXPECT(TOO_LONG, bifrost_rdm_send(endpoint, "x", SIZE_MAX, 0));
    EXPECT(TOO_LONG, bifrost_rdm_send(endpoint, "x", (size_t)BIFROST_RDM_MAX_MESSAGE + 1, 0));
    EXPECT(OK, bifrost_rdm_send(endpoint, NULL, 0, 0));
    EXPECT(OK, bifrost_rdm_send(endpoint, "hello", 5, 0));
    EXPECT(OK, bifrost_rdm_recv(other, 10 * SECOND, &message));
    TRUE(message.len == 0 && message.token != 0);
    EXPECT(OK, bifrost_rdm_release(two, &message));
    EXPECT(OK, bifrost_rdm_release(two, &message));
    EXPECT(OK, bifrost_rdm_recv(other, 10 * SECOND, &message));
    TRUE(message.len == 5 && memcmp(message.data, "hello", 5) == 0);
    EXPECT(INVALID, bifrost_rdm_respond(other, &message, "x", 1));
    stale = message;
    EXPECT(OK, bifrost_rdm_release(two, &message));
    EXPECT(INVALID, bifrost_rdm_release(two, &stale));
    stale.token = 12345;
    EXPECT(INVALID, bifrost_rdm_release(one, &stale));
    EXPECT(TIMEOUT, bifrost_rdm_recv(other, 0, &message));
    EXPECT(TIMEOUT, bifrost_rdm_recv(other, 1000, &message));

    /* Descriptors, for the application's own event loop. */
    EXPECT(OK, bifrost_rdm_descriptor(two, &descriptor));
    EXPECT(OK, bifrost_rdm_descriptor(two, &again));
    TRUE(descriptor == again && descriptor >= 0);
    while (bifrost_rdm_poll(two, &busy) == BIFROST_RDM_STATUS_OK && busy)
        ;
    EXPECT(OK, bifrost_rdm_due(two, &due));
    TRUE(due <= 100000);
    EXPECT(OK, bifrost_rdm_send(endpoint, "wake up", 7, 0));
    {
        struct pollfd ready = {descriptor, POLLIN, 0};

        TRUE(poll(&ready, 1, 10000) == 1 && (ready.revents & POLLIN));
    }
    EXPECT(OK, bifrost_rdm_recv(other, SECOND, &message));
    EXPECT(OK, bifrost_rdm_release(two, &message));
    do {
        turn(one);
        turn(two);
        EXPECT(OK, bifrost_rdm_open_messages(endpoint, &count));
    } while (count > 0);
    EXPECT(OK, bifrost_rdm_flush(endpoint, 0));

    /* Calls: answered, refused, discarded, unknown. */
    EXPECT(INVALID, bifrost_rdm_finish(endpoint, 4711, BIFROST_RDM_FOREVER, &message));
    EXPECT(OK, bifrost_rdm_begin_call(endpoint, "first", 5, &call));
    EXPECT(OK, bifrost_rdm_begin_call(endpoint, "second", 6, &second));
    EXPECT(TIMEOUT, bifrost_rdm_finish(endpoint, call, 0, &message));
    EXPECT(OK, bifrost_rdm_next_request(other, 10 * SECOND, &request));
    EXPECT(INVALID, bifrost_rdm_respond(endpoint, &request, "x", 1));
    EXPECT(OK, bifrost_rdm_respond(other, &request, "1st", 3));
    EXPECT(OK, bifrost_rdm_release(two, &request));
    EXPECT(INVALID, bifrost_rdm_respond(other, &request, "x", 1));
    EXPECT(OK, bifrost_rdm_next_request(other, 10 * SECOND, &request));
    EXPECT(INVALID, bifrost_rdm_refuse(other, &request, NULL));
    EXPECT(OK, bifrost_rdm_refuse(other, &request, "not today"));
    EXPECT(OK, bifrost_rdm_release(two, &request));
    EXPECT(OK, bifrost_rdm_finish(endpoint, call, 10 * SECOND, &message));
    TRUE(message.len == 3 && memcmp(message.data, "1st", 3) == 0);
    EXPECT(OK, bifrost_rdm_release(one, &message));
    EXPECT(FAILURE, bifrost_rdm_finish(endpoint, second, 10 * SECOND, &message));
    TRUE(strstr(bifrost_rdm_last_error(), "not today"));
    EXPECT(INVALID, bifrost_rdm_finish(endpoint, second, 0, &message));
    EXPECT(TIMEOUT, bifrost_rdm_call(endpoint, "?", 1, 1000, &message));
    EXPECT(OK, bifrost_rdm_begin_call(endpoint, "?", 1, &call));
    EXPECT(OK, bifrost_rdm_forget(endpoint, call));
    EXPECT(INVALID, bifrost_rdm_finish(endpoint, call, 0, &message));

    /* Memory. */
    EXPECT(RESOURCES, bifrost_rdm_register(two, SIZE_MAX, &region));
    EXPECT(OK, bifrost_rdm_register(two, 64, &region));
    EXPECT(INVALID, bifrost_rdm_region_allow(region, endpoint, BIFROST_RDM_RIGHT_READ, &remote));
    EXPECT(INVALID, bifrost_rdm_region_allow(region, other, 4, &remote));
    EXPECT(INVALID, bifrost_rdm_region_allow(region, other, BIFROST_RDM_RIGHT_READ, NULL));
    EXPECT(OK, bifrost_rdm_region_allow(region, other, BIFROST_RDM_RIGHT_WRITE, &remote));
    EXPECT(OK, bifrost_rdm_remote_encode(&remote, bytes));
    EXPECT(OK, bifrost_rdm_remote_decode(bytes, &decoded));
    TRUE(decoded.key == remote.key && decoded.len == 64);
    EXPECT(RANGE, bifrost_rdm_begin_write(endpoint, &remote, 60, "12345", 5, &call));
    EXPECT(RANGE, bifrost_rdm_read(endpoint, &remote, UINT64_MAX, bytes, 1, 0));
    EXPECT(OK, bifrost_rdm_begin_write(endpoint, &remote, 60, "1234", 4, &call));
    do
        turn(two);
    while ((status = bifrost_rdm_finish(endpoint, call, 1000, &message)) == BIFROST_RDM_STATUS_TIMEOUT);
    TRUE(status == BIFROST_RDM_STATUS_OK && message.len == 0);
    EXPECT(OK, bifrost_rdm_release(one, &message));
    EXPECT(OK, bifrost_rdm_begin_read(endpoint, &remote, 0, 4, &call));
    do
        turn(two);
    while ((status = bifrost_rdm_finish(endpoint, call, 1000, &message)) == BIFROST_RDM_STATUS_TIMEOUT);
    TRUE(status == BIFROST_RDM_STATUS_FAILURE);
    TRUE(strstr(bifrost_rdm_last_error(), "does not grant"));
    EXPECT(OK, bifrost_rdm_region_get(region, 60, bytes, 4));
    TRUE(memcmp(bytes, "1234", 4) == 0);
    EXPECT(RANGE, bifrost_rdm_region_get(region, 61, bytes, 4));
    EXPECT(RANGE, bifrost_rdm_region_put(region, SIZE_MAX, "x", 1));
    EXPECT(INVALID, bifrost_rdm_region_put(region, 0, NULL, 1));
    EXPECT(OK, bifrost_rdm_region_put(region, 0, "x", 1));
    EXPECT(OK, bifrost_rdm_region_allow(region, other, 0, NULL));

    /* Information about a connection. */
    EXPECT(OK, bifrost_rdm_measured(endpoint, &measured));
    TRUE(measured.window_bytes > 0 && measured.loss >= 0 && measured.loss <= 1);
    EXPECT(OK, bifrost_rdm_peer(endpoint, text, sizeof text));
    TRUE(strncmp(text, "[::1]:", 6) == 0);
    EXPECT(OK, bifrost_rdm_peer(endpoint, text, 4));
    TRUE(strcmp(text, "[::") == 0);
    EXPECT(INVALID, bifrost_rdm_peer(endpoint, text, 0));
    EXPECT(INVALID, bifrost_rdm_switch(endpoint, 7));
    EXPECT(OK, bifrost_rdm_switch(endpoint, BIFROST_RDM_SERVICE_RC));
    EXPECT(INVALID, bifrost_rdm_follow(NULL, "/dev/null"));
    EXPECT(INVALID, bifrost_rdm_follow(one, NULL));
    EXPECT(INVALID, bifrost_rdm_follow(one, "/nonexistent"));
    EXPECT(INVALID, bifrost_rdm_follow(one, "/dev/null"));
    TRUE(strstr(bifrost_rdm_last_error(), "neither `uc` nor `rc`"));
    file = mkstemp(path);
    TRUE(file >= 0 && write(file, "uc\n", 3) == 3 && close(file) == 0);
    EXPECT(OK, bifrost_rdm_follow(one, path));
    TRUE(remove(path) == 0);

    EXPECT(INVALID, bifrost_rdm_statistics(NULL, text, sizeof text, &count));
    EXPECT(INVALID, bifrost_rdm_statistics(one, NULL, 1, &count));
    EXPECT(OK, bifrost_rdm_statistics(one, NULL, 0, &count));
    EXPECT(OK, bifrost_rdm_statistics(one, text, sizeof text, NULL));
    TRUE(count > 1000 && strlen(text) == sizeof text - 1 && strncmp(text, "# HELP bifrost_rdm_", 19) == 0);

    /* More messages than may be open, to an idle peer. */
    for (count = 0; (status = bifrost_rdm_send(endpoint, "x", 1, 0)) == BIFROST_RDM_STATUS_OK; count++)
        TRUE(count < 1024);
    TRUE(status == BIFROST_RDM_STATUS_FULL);
    EXPECT(FULL, bifrost_rdm_send(endpoint, "x", 1, 1000));
    EXPECT(TIMEOUT, bifrost_rdm_flush(endpoint, 1000));

    /* Close in another order than that of creation: a worker before its objects. */
    EXPECT(OK, bifrost_rdm_worker_free(two));
    EXPECT(OK, bifrost_rdm_close(other));
    EXPECT(CLOSED, bifrost_rdm_recv(endpoint, 10 * SECOND, &message));
    EXPECT(CLOSED, bifrost_rdm_send(endpoint, "x", 1, BIFROST_RDM_FOREVER));
    EXPECT(OK, bifrost_rdm_region_get(region, 0, bytes, 1));
    EXPECT(OK, bifrost_rdm_deregister(region));
    EXPECT(OK, bifrost_rdm_worker_free(one));
    EXPECT(OK, bifrost_rdm_close(endpoint));
}

int main(void)
{
    texts();
    configurations();
    nulls();
    connections();
    puts("as expected");
    return 0;
}
