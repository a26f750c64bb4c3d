/* NCCL's interface for network plugins, versions 8 to 12, from its public headers: the parts that the driver uses. */
#ifndef NCCL_NET_TEST_H
#define NCCL_NET_TEST_H

#include <stddef.h>
#include <stdint.h>

#define HANDLE_MAX 128
#define PTR_HOST 1
#define PTR_CUDA 2

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INTERNAL_ERROR = 3, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6 };

typedef void (*logger)(int level, unsigned long flags, const char *file, int line, const char *format, ...);

#define PROPERTIES_BEGIN \
    char *name; \
    char *pci_path; \
    uint64_t guid; \
    int ptr_support; \
    int reg_is_global;

#define PROPERTIES_MIDDLE \
    int speed; \
    int port; \
    float latency; \
    int max_comms; \
    int max_recvs; \
    int net_device_type; \
    int net_device_version;

struct properties_v8 {
    PROPERTIES_BEGIN
    PROPERTIES_MIDDLE
};

struct properties_v9 { /* and version 10 */
    PROPERTIES_BEGIN
    int force_flush;
    PROPERTIES_MIDDLE
    struct {
        int count;
        int devices[4];
    } virtual;
    size_t max_p2p_bytes;
    size_t max_coll_bytes;
};

struct properties_v11 {
    PROPERTIES_BEGIN
    int force_flush;
    PROPERTIES_MIDDLE
    struct {
        int count;
        int devices[4];
    } virtual;
    size_t max_p2p_bytes;
    size_t max_coll_bytes;
    int max_multi_request_size;
};

struct properties_v12 {
    PROPERTIES_BEGIN
    int force_flush;
    PROPERTIES_MIDDLE
    struct {
        int count;
        int devices[8];
    } virtual;
    size_t max_p2p_bytes;
    size_t max_coll_bytes;
    int max_multi_request_size;
    int16_t rail_id;
    int16_t plane_id;
};

/* The functions after those that differ between versions; PROPERTIES is the version's structure. */
#define TABLE_BEGIN(INIT, PROPERTIES, LISTEN, CONNECT) \
    const char *name; \
    int(*init) INIT; \
    int (*devices)(int *); \
    int (*get_properties)(int, struct PROPERTIES *); \
    int(*listen) LISTEN; \
    int(*connect) CONNECT; \
    int (*accept)(void *, void **, void **); \
    int (*reg_mr)(void *, void *, size_t, int, void **); \
    int (*reg_mr_dma_buf)(void *, void *, size_t, int, uint64_t, int, void **); \
    int (*dereg_mr)(void *, void *);

#define TABLE_END \
    int (*iflush)(void *, int, void **, int *, void **, void **); \
    int (*test)(void *, int *, int *); \
    int (*close_send)(void *); \
    int (*close_recv)(void *); \
    int (*close_listen)(void *); \
    int (*get_device_mr)(void *, void *, void **); \
    int (*irecv_consumed)(void *, int, void *);

struct net_v8 {
    TABLE_BEGIN((logger), properties_v8, (int, void *, void **), (int, void *, void **, void **))
    int (*isend)(void *, void *, int, int, void *, void **);
    int (*irecv)(void *, int, void **, int *, int *, void **, void **);
    TABLE_END
};

struct net_v9 {
    TABLE_BEGIN((logger), properties_v9, (int, void *, void **), (int, void *, void **, void **))
    int (*isend)(void *, void *, size_t, int, void *, void **);
    int (*irecv)(void *, int, void **, size_t *, int *, void **, void **);
    TABLE_END
    int (*make_v_device)(int *, void *);
};

struct net_v10 {
    TABLE_BEGIN((logger, void *), properties_v9, (int, void *, void **), (int, void *, void *, void **, void **))
    int (*isend)(void *, void *, size_t, int, void *, void *, void **);
    int (*irecv)(void *, int, void **, size_t *, int *, void **, void **, void **);
    TABLE_END
    int (*make_v_device)(int *, void *);
};

#define TABLE_V11(PROPERTIES) \
    TABLE_BEGIN((void **, uint64_t, void *, logger, void *), PROPERTIES, (void *, int, void *, void **), \
                (void *, int, void *, void **, void **)) \
    int (*isend)(void *, void *, size_t, int, void *, void *, void **); \
    int (*irecv)(void *, int, void **, size_t *, int *, void **, void **, void **); \
    TABLE_END \
    int (*make_v_device)(int *, void *); \
    int (*finalize)(void *); \
    int (*set_net_attr)(void *, void *);

struct net_v11 {
    TABLE_V11(properties_v11)
};

struct net_v12 {
    TABLE_V11(properties_v12)
};

#endif
