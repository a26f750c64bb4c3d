/*
 * libbifrost_rdm: messages between processes over RDMA, or over RoCEv2 in software where there is no RDMA NIC.
 *
 * Made by cbindgen from crates/capi. The guide is docs/RDM-LIBRARY.md.
 *
 * All functions return a status, and say more in bifrost_rdm_last_error(). What they give is behind their last arguments,
 * which are written only if the status is BIFROST_RDM_STATUS_OK. A worker and all that was made with it may be used by any
 * thread, but by one at a time: a call that finds another one at work returns BIFROST_RDM_STATUS_BUSY, and has done nothing.
 * Threads that work side by side have a worker each.
 */

#ifndef BIFROST_RDM_H
#define BIFROST_RDM_H

#include <stddef.h>
#include <stdint.h>

/**
 * The version of this interface. It grows with what is added; what is taken away or changed
 * changes the library's name, which now ends with .so.0.
 */
#define BIFROST_RDM_ABI 2

/**
 * config.provider: whatever there is.
 */
#define BIFROST_RDM_PROVIDER_AUTO 0

/**
 * config.provider: the NIC in software, RoCEv2 over UDP.
 */
#define BIFROST_RDM_PROVIDER_SOFT 1

/**
 * config.provider: an RDMA NIC.
 */
#define BIFROST_RDM_PROVIDER_VERBS 2

/**
 * The NIC repeats what is lost: reliable connections.
 */
#define BIFROST_RDM_SERVICE_RC 1

/**
 * The library repeats what is lost: unreliable connections.
 */
#define BIFROST_RDM_SERVICE_UC 2

/**
 * config.service: both are set up, and bifrost_rdm_switch chooses.
 */
#define BIFROST_RDM_SERVICE_BOTH 3

/**
 * config.order: messages are delivered as they were sent.
 */
#define BIFROST_RDM_ORDER_SENT 0

/**
 * config.order: messages are delivered as they are complete.
 */
#define BIFROST_RDM_ORDER_COMPLETE 1

/**
 * A right to a region: to read it.
 */
#define BIFROST_RDM_RIGHT_READ 1

/**
 * A right to a region: to write it.
 */
#define BIFROST_RDM_RIGHT_WRITE 2

/**
 * A timeout that does not end.
 */
#define BIFROST_RDM_FOREVER UINT64_MAX

/**
 * Bytes of what bifrost_rdm_remote_encode writes.
 */
#define BIFROST_RDM_REMOTE_LEN 16

/**
 * The longest message, bytes.
 */
#define BIFROST_RDM_MAX_MESSAGE (256 << 20)

/**
 * What a call comes to.
 */
typedef enum {
  /**
   * It is done.
   */
  BIFROST_RDM_STATUS_OK = 0,
  /**
   * An argument is null, out of range, or not what it should be.
   */
  BIFROST_RDM_STATUS_INVALID = 1,
  /**
   * The time is over. What was begun goes on.
   */
  BIFROST_RDM_STATUS_TIMEOUT = 2,
  /**
   * 1024 messages are open on the connection: wait until some have arrived.
   */
  BIFROST_RDM_STATUS_FULL = 3,
  /**
   * The connection has ended, and nothing is left to be read.
   */
  BIFROST_RDM_STATUS_CLOSED = 4,
  /**
   * Another thread is in a call of this worker. Nothing was done.
   */
  BIFROST_RDM_STATUS_BUSY = 5,
  /**
   * An address or a port cannot be bound.
   */
  BIFROST_RDM_STATUS_BIND = 6,
  /**
   * The peer cannot be reached.
   */
  BIFROST_RDM_STATUS_UNREACHABLE = 7,
  /**
   * The peer refused the connection.
   */
  BIFROST_RDM_STATUS_REFUSED = 8,
  /**
   * The peer does not keep to the protocol.
   */
  BIFROST_RDM_STATUS_PROTOCOL = 9,
  /**
   * The message is longer than the peer takes, or than there may be.
   */
  BIFROST_RDM_STATUS_TOO_LONG = 10,
  /**
   * An access would leave a region.
   */
  BIFROST_RDM_STATUS_RANGE = 11,
  /**
   * The peer could not do what it was asked for; the text is the peer's.
   */
  BIFROST_RDM_STATUS_FAILURE = 12,
  /**
   * No memory, descriptor, connection or region is left.
   */
  BIFROST_RDM_STATUS_RESOURCES = 13,
  /**
   * This connection, this library, or this host without a suitable RDMA NIC, cannot do that.
   */
  BIFROST_RDM_STATUS_UNSUPPORTED = 14,
  /**
   * A system call failed.
   */
  BIFROST_RDM_STATUS_SYSTEM = 15,
  /**
   * A defect of the library has shown. Its worker cannot be used any more.
   */
  BIFROST_RDM_STATUS_BROKEN = 16,
} bifrost_rdm_status;

/**
 * One end of a connection. Opaque.
 */
typedef struct bifrost_rdm_endpoint bifrost_rdm_endpoint;

/**
 * A socket where connections are set up. Opaque.
 */
typedef struct bifrost_rdm_listener bifrost_rdm_listener;

/**
 * Memory that peers may read and write. Opaque.
 */
typedef struct bifrost_rdm_region bifrost_rdm_region;

/**
 * Looks after connections. Opaque.
 */
typedef struct bifrost_rdm_worker bifrost_rdm_worker;

/**
 * Settings of a worker. bifrost_rdm_config_init fills in the defaults.
 */
typedef struct {
  /**
   * Bytes of this structure, as the caller knows it. Later versions of it are longer.
   */
  uint32_t size;
  /**
   * What carries packets: BIFROST_RDM_PROVIDER_AUTO, which is the default, _SOFT, or
   * _VERBS, the RDMA NIC of the address.
   */
  uint32_t provider;
  /**
   * Who repeats what is lost: BIFROST_RDM_SERVICE_UC, which is the default, _RC or _BOTH.
   * Both ends need the same.
   */
  uint32_t service;
  /**
   * Payload of a packet, bytes: 256, 512, 1024, 2048 or 4096. Both ends need the same. Default:
   * 1024.
   */
  uint32_t mtu;
  /**
   * In which order messages are delivered: BIFROST_RDM_ORDER_SENT, which is the default, or
   * _COMPLETE.
   */
  uint32_t order;
  /**
   * UDP port of RoCEv2; 0: any that is free. Peers are told. Default: 4791.
   */
  uint32_t port;
  /**
   * Messages that are taken ahead of the application, 1 to 1024. Default: 256.
   */
  uint32_t window;
  /**
   * The longest message that is taken, bytes, up to 256 MiB, which is the default.
   */
  uint32_t longest;
  /**
   * Connections, 1 to 16,384. Default: 256.
   */
  uint32_t connections;
  /**
   * Queueing that congestion control aims at, us, 1 to 1,000,000. Default: 500.
   */
  uint32_t queue_us;
  /**
   * Added to the time within which an answer is expected, us, up to 1,000,000. Default: 500.
   */
  uint32_t patience_us;
  /**
   * For how long to look for packets before sleeping, us, up to 1,000,000. Default: 30.
   */
  uint32_t spin_us;
} bifrost_rdm_config;

/**
 * What is measured on a connection.
 */
typedef struct {
  /**
   * Smoothed round trip, ns.
   */
  uint64_t rtt_ns;
  /**
   * Smallest round trip, ns.
   */
  uint64_t min_rtt_ns;
  /**
   * Congestion window, bytes.
   */
  uint32_t window_bytes;
  /**
   * Share of packets that is lost, 0 to 1.
   */
  float loss;
  /**
   * Queue pair in use.
   */
  uint32_t lane;
} bifrost_rdm_measured_data;

/**
 * What names a region of the peer. The peer tells it, in a message for instance.
 */
typedef struct {
  /**
   * Names the region, on the connection for which it was allowed.
   */
  uint64_t key;
  /**
   * Its bytes.
   */
  uint64_t len;
} bifrost_rdm_remote;

/**
 * A message that has come in. Its bytes are the library's, and stay until bifrost_rdm_release.
 */
typedef struct {
  /**
   * Its bytes.
   */
  const void *data;
  /**
   * How many.
   */
  size_t len;
  /**
   * Names it. 0 is none.
   */
  uint64_t token;
} bifrost_rdm_message;

/**
 * What a worker has counted, of all its connections.
 */
typedef struct {
  /**
   * Messages that were taken from the application.
   */
  uint64_t sent_messages;
  /**
   * Messages that were given to the application.
   */
  uint64_t delivered_messages;
  /**
   * Their bytes.
   */
  uint64_t delivered_bytes;
  /**
   * Work requests that were taken to be lost.
   */
  uint64_t lost_requests;
  /**
   * Pieces that were sent again.
   */
  uint64_t repaired;
  /**
   * Timers that ran out with something in flight.
   */
  uint64_t timeouts;
  /**
   * Changes of the queue pair in use because it failed.
   */
  uint64_t lane_flips;
  /**
   * What peers sent and may not.
   */
  uint64_t refused;
  /**
   * Writes of peers to regions that were executed.
   */
  uint64_t peer_writes;
  /**
   * Reads of regions by peers that were answered.
   */
  uint64_t peer_reads;
  /**
   * Accesses of peers to regions that were refused.
   */
  uint64_t peer_refused;
  /**
   * Packets that the sockets had no room for, in runs.
   */
  uint64_t no_room_runs;
} bifrost_rdm_counters_data;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Fills in the defaults.
 */
bifrost_rdm_status bifrost_rdm_config_init(bifrost_rdm_config *config, size_t size);

/**
 * Listens for peers that want to connect, over TCP. Port 0: any that is free. Status: BIND.
 */
bifrost_rdm_status bifrost_rdm_listen(const bifrost_rdm_worker *worker,
                                      const char *address,
                                      uint16_t port,
                                      bifrost_rdm_listener **out);

/**
 * The port on which it listens.
 */
bifrost_rdm_status bifrost_rdm_listener_port(const bifrost_rdm_listener *listener, uint16_t *port);

/**
 * Stops listening. Connections that were accepted stay. Null is nothing to close.
 */
bifrost_rdm_status bifrost_rdm_listener_close(bifrost_rdm_listener *listener);

/**
 * Waits for a peer to connect. Peers that do not fit are refused, and waited on. Status:
 * TIMEOUT.
 */
bifrost_rdm_status bifrost_rdm_accept(bifrost_rdm_listener *listener,
                                      uint64_t timeout_us,
                                      bifrost_rdm_endpoint **out);

/**
 * Connects to a peer that listens. Other connections of the worker go on meanwhile. Status:
 * UNREACHABLE, REFUSED, TIMEOUT, RESOURCES.
 */
bifrost_rdm_status bifrost_rdm_connect(const bifrost_rdm_worker *worker,
                                       const char *address,
                                       uint16_t port,
                                       uint64_t timeout_us,
                                       bifrost_rdm_endpoint **out);

/**
 * Closes a connection. What was sent and has not arrived is lost: bifrost_rdm_flush waits for
 * it. Null is nothing to close.
 */
bifrost_rdm_status bifrost_rdm_close(bifrost_rdm_endpoint *endpoint);

/**
 * Writes the peer's address, such as [fd00::2]:7000, into text, which has room for size
 * bytes; what does not fit is left out, and the last byte is 0.
 */
bifrost_rdm_status bifrost_rdm_peer(const bifrost_rdm_endpoint *endpoint, char *text, size_t size);

/**
 * What is measured on a connection. Status: CLOSED.
 */
bifrost_rdm_status bifrost_rdm_measured(const bifrost_rdm_endpoint *endpoint,
                                        bifrost_rdm_measured_data *measured);

/**
 * What this end sends from now on goes by queue pairs of BIFROST_RDM_SERVICE_RC or _UC, on a
 * connection that has both. Status: UNSUPPORTED if it has not.
 */
bifrost_rdm_status bifrost_rdm_switch(const bifrost_rdm_endpoint *endpoint, uint32_t service);

/**
 * Registers len bytes of memory, all 0, for peers to read and write: bifrost_rdm_region_allow
 * lets them in. Peers need nothing of this application but that its worker is polled. Status:
 * RESOURCES.
 */
bifrost_rdm_status bifrost_rdm_register(const bifrost_rdm_worker *worker,
                                        size_t len,
                                        bifrost_rdm_region **out);

/**
 * Takes the memory back: no peer reads or writes it any more. Null is nothing to take back.
 */
bifrost_rdm_status bifrost_rdm_deregister(bifrost_rdm_region *region);

/**
 * Lets the peer of an endpoint in, or changes what it may do: rights is a sum of
 * BIFROST_RDM_RIGHT_READ and _WRITE, or 0: nothing any more. remote is what the peer must
 * know; it may be null if rights is 0.
 */
bifrost_rdm_status bifrost_rdm_region_allow(const bifrost_rdm_region *region,
                                            const bifrost_rdm_endpoint *endpoint,
                                            uint32_t rights,
                                            bifrost_rdm_remote *remote);

/**
 * Copies bytes of this end's region out, as peers have left them. Status: RANGE.
 */
bifrost_rdm_status bifrost_rdm_region_get(const bifrost_rdm_region *region,
                                          size_t offset,
                                          void *into,
                                          size_t len);

/**
 * Copies bytes into this end's region: peers read them from now on. Status: RANGE.
 */
bifrost_rdm_status bifrost_rdm_region_put(const bifrost_rdm_region *region,
                                          size_t offset,
                                          const void *data,
                                          size_t len);

/**
 * Writes what the peer must know into 16 bytes, in an order that does not depend on the processor.
 */
bifrost_rdm_status bifrost_rdm_remote_encode(const bifrost_rdm_remote *remote, void *bytes);

/**
 * Reads what bifrost_rdm_remote_encode wrote.
 */
bifrost_rdm_status bifrost_rdm_remote_decode(const void *bytes, bifrost_rdm_remote *remote);

/**
 * Writes to a region of the peer, and waits until the bytes are there. The peer's application has
 * nothing to do with it. Status: RANGE, FAILURE when the peer refuses, TIMEOUT, FULL,
 * CLOSED.
 */
bifrost_rdm_status bifrost_rdm_write(const bifrost_rdm_endpoint *endpoint,
                                     const bifrost_rdm_remote *remote,
                                     uint64_t offset,
                                     const void *data,
                                     size_t len,
                                     uint64_t timeout_us);

/**
 * Reads from a region of the peer. The peer's application has nothing to do with it. Status: as
 * for bifrost_rdm_write.
 */
bifrost_rdm_status bifrost_rdm_read(const bifrost_rdm_endpoint *endpoint,
                                    const bifrost_rdm_remote *remote,
                                    uint64_t offset,
                                    void *into,
                                    uint32_t len,
                                    uint64_t timeout_us);

/**
 * Begins to write to a region of the peer; bifrost_rdm_finish has an empty message once the
 * bytes are there. Writes to one region take place in the order in which they were begun.
 */
bifrost_rdm_status bifrost_rdm_begin_write(const bifrost_rdm_endpoint *endpoint,
                                           const bifrost_rdm_remote *remote,
                                           uint64_t offset,
                                           const void *data,
                                           size_t len,
                                           uint32_t *call);

/**
 * Begins to read from a region of the peer; bifrost_rdm_finish has the bytes. It sees writes of
 * this end that were begun before.
 */
bifrost_rdm_status bifrost_rdm_begin_read(const bifrost_rdm_endpoint *endpoint,
                                          const bifrost_rdm_remote *remote,
                                          uint64_t offset,
                                          uint32_t len,
                                          uint32_t *call);

/**
 * Sends a message, and waits up to timeout_us for room if 1024 are open. The bytes are copied.
 * The message is on its way when this returns, and has arrived when it is no longer one of
 * bifrost_rdm_open_messages. Status: FULL, TOO_LONG, CLOSED.
 */
bifrost_rdm_status bifrost_rdm_send(const bifrost_rdm_endpoint *endpoint,
                                    const void *data,
                                    size_t len,
                                    uint64_t timeout_us);

/**
 * Messages that were sent and have not arrived.
 */
bifrost_rdm_status bifrost_rdm_open_messages(const bifrost_rdm_endpoint *endpoint, size_t *count);

/**
 * Waits until all that was sent has arrived. Status: TIMEOUT, CLOSED.
 */
bifrost_rdm_status bifrost_rdm_flush(const bifrost_rdm_endpoint *endpoint, uint64_t timeout_us);

/**
 * Waits for the next message; with a timeout of 0 it only looks. Status: TIMEOUT, CLOSED.
 */
bifrost_rdm_status bifrost_rdm_recv(const bifrost_rdm_endpoint *endpoint,
                                    uint64_t timeout_us,
                                    bifrost_rdm_message *out);

/**
 * Gives a message back, whose bytes are then no longer there, and makes room for another one of
 * its connection. Its token becomes 0; one whose token is 0 is nothing to give back.
 */
bifrost_rdm_status bifrost_rdm_release(const bifrost_rdm_worker *worker,
                                       bifrost_rdm_message *message);

/**
 * Asks the peer, and waits for its response. Status: FAILURE when the peer says that it has
 * none, with its text; TIMEOUT, FULL, TOO_LONG, CLOSED.
 */
bifrost_rdm_status bifrost_rdm_call(const bifrost_rdm_endpoint *endpoint,
                                    const void *data,
                                    size_t len,
                                    uint64_t timeout_us,
                                    bifrost_rdm_message *out);

/**
 * Begins a call; bifrost_rdm_finish has the response. Many may be open at once.
 */
bifrost_rdm_status bifrost_rdm_begin_call(const bifrost_rdm_endpoint *endpoint,
                                          const void *data,
                                          size_t len,
                                          uint32_t *call);

/**
 * Waits for the response to a call, a write or a read that was begun; with a timeout of 0 it only
 * looks. After TIMEOUT it is still open; after anything else it is not.
 */
bifrost_rdm_status bifrost_rdm_finish(const bifrost_rdm_endpoint *endpoint,
                                      uint32_t call,
                                      uint64_t timeout_us,
                                      bifrost_rdm_message *out);

/**
 * Gives up waiting for the response to a call, a write or a read. What was asked for may happen
 * all the same.
 */
bifrost_rdm_status bifrost_rdm_forget(const bifrost_rdm_endpoint *endpoint, uint32_t call);

/**
 * Waits for the next request; with a timeout of 0 it only looks. It is answered by
 * bifrost_rdm_respond or bifrost_rdm_refuse, and then given back by bifrost_rdm_release.
 * Status: TIMEOUT, CLOSED.
 */
bifrost_rdm_status bifrost_rdm_next_request(const bifrost_rdm_endpoint *endpoint,
                                            uint64_t timeout_us,
                                            bifrost_rdm_message *out);

/**
 * Answers a request. Status: FULL, TOO_LONG, CLOSED.
 */
bifrost_rdm_status bifrost_rdm_respond(const bifrost_rdm_endpoint *endpoint,
                                       const bifrost_rdm_message *request,
                                       const void *data,
                                       size_t len);

/**
 * Answers a request that cannot be met with the reason.
 */
bifrost_rdm_status bifrost_rdm_refuse(const bifrost_rdm_endpoint *endpoint,
                                      const bifrost_rdm_message *request,
                                      const char *reason);

/**
 * What a code means: a text that stays. A number that is not a code has one, too.
 */
const char *bifrost_rdm_status_text(int32_t status);

/**
 * What the last call of this thread that failed has to say: the peer, the cause. It stays until
 * another call of this thread fails.
 */
const char *bifrost_rdm_last_error(void);

/**
 * The version of the interface that the library has: BIFROST_RDM_ABI of its header.
 */
uint32_t bifrost_rdm_abi(void);

/**
 * The library's version, such as "0.1.0".
 */
const char *bifrost_rdm_version(void);

/**
 * Makes a worker whose packets have the address address, such as "fd00::1" or "10.0.0.1".
 * Without config: the defaults.
 *
 * Status: BIND when the address or the port cannot be bound; RESOURCES.
 */
bifrost_rdm_status bifrost_rdm_worker_new(const char *address,
                                          const bifrost_rdm_config *config,
                                          bifrost_rdm_worker **out);

/**
 * Frees a worker. Its endpoints, listeners and regions stay until they are closed themselves;
 * messages that came in do not. Null is nothing to free.
 */
bifrost_rdm_status bifrost_rdm_worker_free(bifrost_rdm_worker *worker);

/**
 * Writes what carries the packets, in words, into text, which has room for size bytes; what
 * does not fit is left out, and the last byte is 0.
 */
bifrost_rdm_status bifrost_rdm_worker_provider(const bifrost_rdm_worker *worker,
                                               char *text,
                                               size_t size);

/**
 * Does what there is to do, without waiting. busy, unless it is null: 1 if there was something,
 * 0 if not.
 */
bifrost_rdm_status bifrost_rdm_poll(const bifrost_rdm_worker *worker, int32_t *busy);

/**
 * Does what there is to do, and waits for something if there is nothing. Status: TIMEOUT.
 */
bifrost_rdm_status bifrost_rdm_wait(const bifrost_rdm_worker *worker, uint64_t timeout_us);

/**
 * Has a file choose the service: what this end sends on all connections of the worker, those that
 * are made later, too, goes by uc or rc, as the file says. It is read now and every 100 ms
 * while the worker is called: replace the file to move running processes. The worker needs
 * BIFROST_RDM_SERVICE_BOTH. Status: INVALID if it has not, or the file cannot be read or says
 * something else; if that happens later, the service stays. Since version 2.
 */
bifrost_rdm_status bifrost_rdm_follow(const bifrost_rdm_worker *worker, const char *path);

/**
 * The descriptor on which packets come in, for poll(2) or epoll(7). When it is readable, and when
 * due_us of bifrost_rdm_due are over, call bifrost_rdm_poll until there is nothing to do. It
 * is the library's, and closed with the worker.
 */
bifrost_rdm_status bifrost_rdm_descriptor(const bifrost_rdm_worker *worker, int32_t *descriptor);

/**
 * For how long the worker has nothing to do if no packet comes, us, at most 100,000.
 */
bifrost_rdm_status bifrost_rdm_due(const bifrost_rdm_worker *worker, uint64_t *due_us);

/**
 * What the worker has counted. size: bytes of the structure, as the caller knows it; later
 * versions of it are longer.
 */
bifrost_rdm_status bifrost_rdm_counters(const bifrost_rdm_worker *worker,
                                        bifrost_rdm_counters_data *counters,
                                        size_t size);

/**
 * Writes all that the worker has counted into text, in the text format that Prometheus reads. It has
 * room for size bytes; what does not fit is left out, and the last byte is 0. needed, unless it is
 * null: how much room the whole text needs. With a size of 0 nothing is written, and text may be
 * null.
 */
bifrost_rdm_status bifrost_rdm_statistics(const bifrost_rdm_worker *worker,
                                          char *text,
                                          size_t size,
                                          size_t *needed);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* BIFROST_RDM_H */
