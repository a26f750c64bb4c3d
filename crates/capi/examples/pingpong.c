/*
 * A server and a client, which makes calls, sends messages and writes, verifies every byte, and measures the time.
 *
 *     cc -std=c11 pingpong.c -o pingpong $(pkg-config --cflags --libs bifrost-rdm)
 *     ./pingpong serve ::1                  prints its port
 *     ./pingpong ask ::1 ::1 PORT 1000 32768    1000 calls and 1000 messages of 32 KiB
 */
#define _POSIX_C_SOURCE 200809L
#include <bifrost_rdm.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SECOND UINT64_C(1000000)
#define AHEAD 64

/* Exits if a call failed. */
static void check(bifrost_rdm_status status, const char *what)
{
    if (status != BIFROST_RDM_STATUS_OK) {
        fprintf(stderr, "pingpong: %s: %s (%s)\n", what, bifrost_rdm_last_error(), bifrost_rdm_status_text(status));
        exit(1);
    }
}

static void fail(const char *what)
{
    fprintf(stderr, "pingpong: %s\n", what);
    exit(1);
}

static bifrost_rdm_worker *new_worker(const char *address)
{
    bifrost_rdm_config config;
    bifrost_rdm_worker *worker;
    char text[200];

    check(bifrost_rdm_config_init(&config, sizeof config), "config");
    config.port = 0; /* any free port: several processes share the address */
    check(bifrost_rdm_worker_new(address, &config, &worker), "worker");
    check(bifrost_rdm_worker_provider(worker, text, sizeof text), "provider");
    fprintf(stderr, "pingpong: %s\n", text);
    return worker;
}

/* Data that differs between messages. */
static void fill(unsigned char *bytes, size_t len, unsigned seed)
{
    for (size_t at = 0; at < len; at++)
        bytes[at] = (unsigned char)(at * 7 + at / 251 + seed * 13);
}

static double now_us(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

/* Echoes calls and messages, and provides memory, until the peer has ended. */
static void serve(const char *address)
{
    bifrost_rdm_worker *worker = new_worker(address);
    bifrost_rdm_listener *listener;
    bifrost_rdm_endpoint *endpoint;
    bifrost_rdm_region *region;
    bifrost_rdm_remote remote;
    bifrost_rdm_message message;
    bifrost_rdm_status status;
    unsigned char encoded[BIFROST_RDM_REMOTE_LEN];
    uint16_t port;

    check(bifrost_rdm_listen(worker, address, 0, &listener), "listen");
    check(bifrost_rdm_listener_port(listener, &port), "port");
    printf("%u\n", (unsigned)port);
    fflush(stdout);
    check(bifrost_rdm_accept(listener, 60 * SECOND, &endpoint), "accept");
    check(bifrost_rdm_listener_close(listener), "close the listener");

    check(bifrost_rdm_register(worker, 1 << 20, &region), "register");
    check(bifrost_rdm_region_allow(region, endpoint, BIFROST_RDM_RIGHT_READ | BIFROST_RDM_RIGHT_WRITE, &remote), "allow");
    check(bifrost_rdm_remote_encode(&remote, encoded), "encode");
    check(bifrost_rdm_send(endpoint, encoded, sizeof encoded, SECOND), "send");

    for (;;) {
        int any = 0;

        status = bifrost_rdm_next_request(endpoint, 0, &message);
        if (status == BIFROST_RDM_STATUS_OK) {
            check(bifrost_rdm_respond(endpoint, &message, message.data, message.len), "respond");
            check(bifrost_rdm_release(worker, &message), "release");
            any = 1;
        } else if (status == BIFROST_RDM_STATUS_CLOSED) {
            break;
        } else if (status != BIFROST_RDM_STATUS_TIMEOUT) {
            check(status, "next request");
        }
        status = bifrost_rdm_recv(endpoint, 0, &message);
        if (status == BIFROST_RDM_STATUS_OK) {
            check(bifrost_rdm_send(endpoint, message.data, message.len, 10 * SECOND), "send back");
            check(bifrost_rdm_release(worker, &message), "release");
            any = 1;
        } else if (status != BIFROST_RDM_STATUS_TIMEOUT && status != BIFROST_RDM_STATUS_CLOSED) {
            check(status, "recv");
        }
        if (!any) {
            status = bifrost_rdm_wait(worker, SECOND);
            if (status != BIFROST_RDM_STATUS_TIMEOUT)
                check(status, "wait");
        }
    }
    check(bifrost_rdm_deregister(region), "deregister");
    check(bifrost_rdm_close(endpoint), "close");
    check(bifrost_rdm_worker_free(worker), "free");
}

static void ask(const char *address, const char *peer, uint16_t port, unsigned count, size_t len)
{
    bifrost_rdm_worker *worker = new_worker(address);
    bifrost_rdm_endpoint *endpoint;
    bifrost_rdm_remote remote;
    bifrost_rdm_message message;
    bifrost_rdm_counters_data counters;
    unsigned char *bytes = malloc(len + 1), *back = malloc(len + 1);
    unsigned sent = 0, received = 0;
    double began, calls_us, messages_us;

    if (!bytes || !back)
        fail("out of memory");
    check(bifrost_rdm_connect(worker, peer, port, 10 * SECOND, &endpoint), "connect");
    check(bifrost_rdm_recv(endpoint, 10 * SECOND, &message), "recv");
    if (message.len != BIFROST_RDM_REMOTE_LEN)
        fail("the peer did not send its region");
    check(bifrost_rdm_remote_decode(message.data, &remote), "decode");
    check(bifrost_rdm_release(worker, &message), "release");

    /* Calls, one at a time. */
    began = now_us();
    for (unsigned call = 0; call < count; call++) {
        fill(bytes, len, call);
        check(bifrost_rdm_call(endpoint, bytes, len, 10 * SECOND, &message), "call");
        if (message.len != len || memcmp(message.data, bytes, len) != 0)
            fail("a response differs from the request");
        check(bifrost_rdm_release(worker, &message), "release");
    }
    calls_us = now_us() - began;

    /* Messages, several in flight; the echoes arrive in order. */
    began = now_us();
    while (received < count) {
        if (sent < count && sent < received + AHEAD) {
            fill(bytes, len, sent++);
            check(bifrost_rdm_send(endpoint, bytes, len, 10 * SECOND), "send");
            continue;
        }
        check(bifrost_rdm_recv(endpoint, 10 * SECOND, &message), "recv");
        fill(bytes, len, received++);
        if (message.len != len || memcmp(message.data, bytes, len) != 0)
            fail("an echo differs from the message");
        check(bifrost_rdm_release(worker, &message), "release");
    }
    messages_us = now_us() - began;

    /* The peer's memory, without its application. */
    if (len <= remote.len) {
        uint64_t offset = remote.len - len;

        fill(bytes, len, 99);
        check(bifrost_rdm_write(endpoint, &remote, offset, bytes, len, 10 * SECOND), "write");
        check(bifrost_rdm_read(endpoint, &remote, offset, back, (uint32_t)len, 10 * SECOND), "read");
        if (memcmp(bytes, back, len) != 0)
            fail("the peer's memory differs from what was written");
    }

    check(bifrost_rdm_counters(worker, &counters, sizeof counters), "counters");
    printf("%u calls of %zu bytes: %.1f us each\n", count, len, calls_us / count);
    printf("%u messages echoed: %.1f us each\n", count, messages_us / count);
    printf("lost and retransmitted: %llu\n", (unsigned long long)counters.lost_requests);
    check(bifrost_rdm_close(endpoint), "close");
    check(bifrost_rdm_worker_free(worker), "free");
    free(bytes);
    free(back);
}

int main(int argc, char **argv)
{
    /* A library older than this program's header may lack functions. */
    if (bifrost_rdm_abi() < BIFROST_RDM_ABI)
        fail("the library is older than this program");
    if (argc == 3 && strcmp(argv[1], "serve") == 0) {
        serve(argv[2]);
    } else if (argc == 7 && strcmp(argv[1], "ask") == 0) {
        unsigned count = (unsigned)strtoul(argv[5], NULL, 10);

        if (count == 0)
            fail("COUNT must be greater than 0");
        ask(argv[2], argv[3], (uint16_t)strtoul(argv[4], NULL, 10), count, (size_t)strtoul(argv[6], NULL, 10));
    } else {
        fprintf(stderr, "usage: pingpong serve ADDRESS | pingpong ask ADDRESS PEER PORT COUNT BYTES\n");
        return 2;
    }
    return 0;
}
