/*
 * Lets user-mode Linux run on processors with more register state than its buffers hold (2.7 KB in Linux 6.1; AMX
 * needs 11 KB): the host refuses to set only a part of a thread's state. Preloaded into linux.uml, this library sets
 * the known part and leaves the rest unchanged. Programs in the guest never request tile permission, so tiles are
 * never in use.
 */
#define _GNU_SOURCE
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* The largest state of a processor: eight tiles of 1 KB, and the state before them. */
static char state[65536] __attribute__((aligned(64)));

long ptrace(enum __ptrace_request request, ...)
{
	va_list arguments;
	va_start(arguments, request);
	pid_t pid = va_arg(arguments, pid_t);
	void *address = va_arg(arguments, void *);
	void *data = va_arg(arguments, void *);
	va_end(arguments);

	/* The size that this host requires, once it is known. */
	static size_t size;
	const struct iovec *part = data;
	struct iovec all = { state, sizeof(state) };
	if (request == PTRACE_SETREGSET && address == (void *)NT_X86_XSTATE && (size == 0 || part->iov_len < size)) {
		if (syscall(SYS_ptrace, PTRACE_GETREGSET, pid, address, &all) < 0)
			return -1;
		size = all.iov_len;
		if (part->iov_len < size) {
			memcpy(state, part->iov_base, part->iov_len);
			data = &all;
		}
	}
	/* The C library's own PEEK requests return the word; UML does not use them for registers. */
	if (request == PTRACE_PEEKTEXT || request == PTRACE_PEEKDATA || request == PTRACE_PEEKUSER) {
		long word;
		long result = syscall(SYS_ptrace, request, pid, address, &word);
		return result < 0 ? result : word;
	}
	return syscall(SYS_ptrace, request, pid, address, data);
}
