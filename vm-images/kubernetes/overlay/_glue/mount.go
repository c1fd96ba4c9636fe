package mount

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"k8s.io/klog/v2"
	"k8s.io/mount-utils/native/mounting"
)

// nativeMount mounts by mount(2). It returns false if doMount must run mount(8).
func nativeMount(mounterPath, mountCmd, source, target, fstype string, options, sensitiveOptions, mountFlags []string) (bool, error) {
	if mounterPath != "" || mountCmd != defaultMountCommand {
		return false, nil
	}
	known, err := mounting.Mount(mounting.Request{
		Source: source, Target: target, FSType: fstype,
		Options: slices.Concat(options, sensitiveOptions), Arguments: mountFlags,
	})
	if !known {
		return false, nil
	}
	_, arguments := MakeMountArgsSensitiveWithMountFlags(source, target, fstype, options, sensitiveOptions, mountFlags)
	if err != nil {
		klog.Errorf("Mount failed: %v\nMounting arguments: %s\n", err, arguments)
		return true, fmt.Errorf("mount failed: %w\nMounting arguments: %s", err, arguments)
	}
	klog.V(4).Infof("Mounted by mount(2) with arguments (%s)", arguments)
	return true, nil
}

// nativeUnmount unmounts by umount2(2). It returns false if the caller must run umount(8).
func nativeUnmount(target string, flags int, withSafeNotMountedBehavior bool) (bool, error) {
	known, err := mounting.Unmount(target, flags)
	return known, nativeUnmountError(target, err, withSafeNotMountedBehavior)
}

// nativeTryUnmount is nativeUnmount with a timeout, after which it returns context.DeadlineExceeded.
func nativeTryUnmount(target string, withSafeNotMountedBehavior bool, timeout time.Duration) (bool, error) {
	known, err := mounting.UnmountWithin(target, 0, timeout)
	return known, nativeUnmountError(target, err, withSafeNotMountedBehavior)
}

// nativeUnmountError returns the error that the caller returns, as checkUmountError does for umount(8).
func nativeUnmountError(target string, err error, withSafeNotMountedBehavior bool) error {
	var errno unix.Errno
	switch {
	case err == nil:
		klog.V(4).Infof("Unmounted %s by umount2(2)", target)
		return nil
	case !errors.As(err, &errno):
		return err
	// The kernel returns EINVAL if the target is not a mount point.
	case errno == unix.EINVAL && withSafeNotMountedBehavior:
		klog.V(4).Infof("ignoring 'not mounted' error for %s", target)
		return nil
	default:
		return fmt.Errorf("unmount failed: %w\nUnmounting arguments: %s", err, target)
	}
}
