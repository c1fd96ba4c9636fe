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
		kept, err := keptFlags(request.Target, call.keep)
		if err != nil {
			return true, err
		}
		if err := unix.Mount(call.source, request.Target, call.fstype, call.flags|kept, call.data); err != nil {
			return true, fmt.Errorf("mount %q at %q with the flags %#x: %w", call.source, request.Target, call.flags|kept, err)
		}
	}
	return true, nil
}

// keptFlags returns those of the flags that the mount at the target has.
func keptFlags(target string, flags uintptr) (uintptr, error) {
	if flags == 0 {
		return 0, nil
	}
	var filesystem unix.Statfs_t
	if err := unix.Statfs(target, &filesystem); err != nil {
		return 0, fmt.Errorf("read the flags of the mount at %q: %w", target, err)
	}
	found := uintptr(filesystem.Flags) & (unix.ST_RDONLY | unix.ST_NOSUID | unix.ST_NODEV | unix.ST_NOEXEC)
	// The other flags have the same numbers in statfs(2) and in mount(2).
	if filesystem.Flags&symlinksNotFollowed != 0 {
		found |= unix.MS_NOSYMFOLLOW
	}
	return found & flags, nil
}

// symlinksNotFollowed is ST_NOSYMFOLLOW of statfs(2).
const symlinksNotFollowed = 0x2000

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
