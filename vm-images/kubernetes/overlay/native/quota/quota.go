//go:build linux && (amd64 || arm64 || riscv64)

// Package quota reads and sets project quotas by quotactl_fd(2) and ioctl(2). It works for XFS and ext4.
package quota

import (
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Numbers of <linux/quota.h>, <linux/dqblk_xfs.h> and <linux/fs.h>.
const (
	projectQuota      = 2
	getQuota          = 'X'<<8 + 3
	setLimits         = 'X'<<8 + 4
	getState          = 'X'<<8 + 8
	quotaVersion      = 1
	stateVersion      = 1
	projectQuotaFlag  = 1 << 1
	blockSoftLimit    = 1 << 2
	blockHardLimit    = 1 << 3
	projectAccounting = 1 << 4
	projectEnforced   = 1 << 5
	basicBlock        = 512

	getAttributes = 0x801c581f
	setAttributes = 0x401c5820
	inherit       = 0x200
)

// diskQuota is `struct fs_disk_quota`. Its blocks have 512 bytes on every file system.
type diskQuota struct {
	version                              int8
	flags                                int8
	fieldmask                            uint16
	id                                   uint32
	blockHard, blockSoft                 uint64
	inodeHard, inodeSoft                 uint64
	blocks, inodes                       uint64
	inodeTimer, blockTimer               int32
	inodeWarnings, blockWarnings         uint16
	_                                    [4]int8
	realtimeHard, realtimeSoft, realtime uint64
	realtimeTimer                        int32
	realtimeWarnings                     uint16
	_                                    int16
	_                                    [8]byte
}

// quotaState is `struct fs_quota_statv`.
type quotaState struct {
	version int8
	_       uint8
	flags   uint16
	_       uint32
	_       [3][3]uint64
	_       [3]int32
	_       [4]uint16
	_       uint32
	_       [7]uint64
}

// attributes is `struct fsxattr`.
type attributes struct {
	flags, extentSize, extents, project, cowExtentSize uint32
	_                                                  [8]byte
}

// Usage is the space and the number of inodes that are charged to a project.
type Usage struct {
	Bytes, Inodes int64
}

// Supported returns false if the kernel has no quotactl_fd(2), which is new in Linux 5.14.
func Supported() bool {
	_, _, err := unix.Syscall6(unix.SYS_QUOTACTL_FD, ^uintptr(0), getState<<8|projectQuota, 0, 0, 0, 0)
	return err != unix.ENOSYS
}

// State returns whether the file system of the directory accounts project quotas, and whether it enforces their limits.
// The kernel must be Supported.
func State(directory string) (accounting, enforced bool, err error) {
	state := quotaState{version: stateVersion}
	err = quotactl(directory, getState, 0, unsafe.Pointer(&state))
	// The file system is mounted without quotas, or can have none.
	if errors.Is(err, unix.ENOSYS) {
		return false, false, nil
	}
	if err != nil {
		return false, false, fmt.Errorf("read the state of project quotas of %s: %w", directory, err)
	}
	return state.flags&projectAccounting != 0, state.flags&projectEnforced != 0, nil
}

// OfProject returns the usage of a project on the file system of the directory. The error wraps ENOENT if XFS has no
// record of the project.
func OfProject(directory string, project uint32) (Usage, error) {
	var quota diskQuota
	if err := quotactl(directory, getQuota, project, unsafe.Pointer(&quota)); err != nil {
		return Usage{}, fmt.Errorf("read the quota of project %d of %s: %w", project, directory, err)
	}
	return Usage{Bytes: int64(quota.blocks) * basicBlock, Inodes: int64(quota.inodes)}, nil
}

// SetLimit sets the hard and the soft limit on the space of a project. The limit 0 removes them.
func SetLimit(directory string, project uint32, bytes int64) error {
	blocks := uint64(bytes) / basicBlock
	if bytes < 0 || bytes > 0 && blocks == 0 {
		return fmt.Errorf("set the limit of project %d of %s: %d bytes are less than a block; use 0 or at least %d", project, directory, bytes, basicBlock)
	}
	limits := diskQuota{
		version:   quotaVersion,
		flags:     projectQuotaFlag,
		fieldmask: blockSoftLimit | blockHardLimit,
		id:        project,
		blockHard: blocks,
		blockSoft: blocks,
	}
	if err := quotactl(directory, setLimits, project, unsafe.Pointer(&limits)); err != nil {
		return fmt.Errorf("set the limit of project %d of %s to %d bytes: %w", project, directory, bytes, err)
	}
	return nil
}

// ProjectOf returns the project id of a directory.
func ProjectOf(directory string) (uint32, error) {
	fd, err := open(unix.AT_FDCWD, directory, unix.O_DIRECTORY)
	if err != nil {
		return 0, fmt.Errorf("open %s to read its project id: %w", directory, err)
	}
	defer unix.Close(fd)
	var found attributes
	if err := ioctl(fd, getAttributes, &found); err != nil {
		return 0, fmt.Errorf("read the project id of %s: %w", directory, err)
	}
	return found.project, nil
}

func quotactl(directory string, command, project uint32, argument unsafe.Pointer) error {
	fd, err := retried(func() (int, error) {
		return unix.Open(directory, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	})
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	_, err = retried(func() (int, error) {
		_, _, errno := unix.Syscall6(unix.SYS_QUOTACTL_FD, uintptr(fd), uintptr(command<<8|projectQuota), uintptr(project), uintptr(argument), 0, 0)
		return 0, result(errno)
	})
	return err
}

func ioctl(fd int, request uintptr, argument *attributes) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(unsafe.Pointer(argument)))
	return result(errno)
}

// open opens a file for its attributes. It follows no symbolic link, and does not wait for the other end of a pipe.
func open(directory int, name string, flags int) (int, error) {
	return retried(func() (int, error) {
		return unix.Openat(directory, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC|flags, 0)
	})
}

func retried(call func() (int, error)) (int, error) {
	for {
		result, err := call()
		if !errors.Is(err, unix.EINTR) {
			return result, err
		}
	}
}

func result(errno unix.Errno) error {
	if errno == 0 {
		return nil
	}
	return errno
}
