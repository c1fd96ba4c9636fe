package mounting

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// Mount mounts by mount(2). It returns false, and has mounted nothing, if the caller must run mount(8) instead.
//
// If it returns an error after the first of several calls, the mount stays without the flags of the later ones, as
// after mount(8). Errors name no options, which can be secret.
func Mount(request Request) (bool, error) {
	calls, known := plan(request)
	if !known {
		return false, nil
	}
	for _, call := range calls {
		if err := unix.Mount(call.source, request.Target, call.fstype, call.flags, call.data); err != nil {
			return true, fmt.Errorf("mount %q at %q with the flags %#x: %w", call.source, request.Target, call.flags, err)
		}
	}
	return true, nil
}

// Unmount unmounts by umount2(2) with flags such as unix.MNT_FORCE. It returns false, and has unmounted nothing, if the
// caller must run umount(8) instead, because umount(8) does more for this mount than the system call.
//
// The error wraps EINVAL if the target is not a mount point, and EBUSY if it is in use.
func Unmount(target string, flags int) (bool, error) {
	if needsProgram(target) {
		return false, nil
	}
	return true, unmount(target, flags)
}

// UnmountWithin unmounts as Unmount does, and returns context.DeadlineExceeded if the kernel takes longer than the
// timeout. The system call continues in that case: a thread that waits in the kernel cannot be stopped, but
// unix.MNT_FORCE of a later call can let it return.
func UnmountWithin(target string, flags int, timeout time.Duration) (bool, error) {
	if needsProgram(target) {
		return false, nil
	}
	return true, within(timeout, func() error { return unmount(target, flags) })
}

func within(timeout time.Duration, work func() error) error {
	done := make(chan error, 1)
	go func() { done <- work() }()
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case err := <-done:
		return err
	case <-timer.C:
		return context.DeadlineExceeded
	}
}

func unmount(target string, flags int) error {
	if err := unix.Unmount(target, flags); err != nil {
		return fmt.Errorf("unmount %q: %w", target, err)
	}
	return nil
}
