/*
 * Lets user-mode Linux use the vhost-user ports of DPDK. They offer a control queue, which QEMU would serve, but do
 * not serve it themselves: Linux would wait for an answer forever. They also offer packed rings, but user-mode Linux
 * does not set their initial wrap counters (VHOST_USER_SET_VRING_BASE: it leaves them at 0). Preloaded into
 * linux.uml, this library clears both features in the answer to VHOST_USER_GET_FEATURES.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Header of a vhost-user message: the request; flags, of which bit 2 marks a reply; and the length of the payload. */
static const uint32_t about_features[] = { 1, 1 | 1 << 2, 8 };
/* VIRTIO_NET_F_CTRL_VQ and features that need it, to VIRTIO_NET_F_CTRL_MAC_ADDR; VIRTIO_F_RING_PACKED. */
static const uint64_t unwanted = 0x7full << 17 | 1ull << 34;

ssize_t read(int file, void *buffer, size_t length)
{
	static int expected = -1;
	ssize_t got = syscall(SYS_read, file, buffer, length);
	if (file == expected && got == 8) {
		uint64_t features;
		memcpy(&features, buffer, sizeof(features));
		features &= ~unwanted;
		memcpy(buffer, &features, sizeof(features));
	}
	int is_header = got == sizeof(about_features) && memcmp(buffer, about_features, sizeof(about_features)) == 0;
	expected = is_header ? file : -1;
	return got;
}
