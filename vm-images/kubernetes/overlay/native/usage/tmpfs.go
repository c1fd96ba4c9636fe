// Package usage measures directories without a walk over their files.
package usage

import (
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// Usage is the space and the number of inodes below a directory.
type Usage struct {
	Bytes, Inodes int64
}

// OfTmpfs returns the usage of a tmpfs that is mounted at the path. It returns false for every other path, of which
// statfs(2) would not return the usage: a directory within a file system, a bind mount of a part of one, a tmpfs
// without limits, which keeps no account, and other file systems, which also count their own metadata.
//
// Unlike a walk, it counts files that are deleted but open, and those that other mounts hide. Each name of a file counts
// as an inode.
func OfTmpfs(path string) (Usage, bool) {
	// The open file keeps the mount, and so its id, until the end.
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return Usage{}, false
	}
	defer unix.Close(fd)
	var filesystem unix.Statfs_t
	if err := unix.Fstatfs(fd, &filesystem); err != nil || filesystem.Type != unix.TMPFS_MAGIC {
		return Usage{}, false
	}
	if filesystem.Blocks == 0 || filesystem.Files == 0 || !isRoot(fd) {
		return Usage{}, false
	}
	return Usage{
		Bytes:  int64(filesystem.Blocks-filesystem.Bfree) * int64(filesystem.Bsize),
		Inodes: int64(filesystem.Files - filesystem.Ffree),
	}, true
}

// isRoot returns true if the file is the root of a mount that shows its file system from the root on.
func isRoot(fd int) bool {
	var stat unix.Statx_t
	err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE|unix.STATX_MNT_ID, &stat)
	if err != nil || stat.Mask&unix.STATX_MNT_ID == 0 || stat.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0 {
		return false
	}
	mounts, err := mountinfo.GetMounts(func(info *mountinfo.Info) (skip, stop bool) {
		found := uint64(info.ID) == stat.Mnt_id
		return !found, found
	})
	return err == nil && len(mounts) == 1 && mounts[0].Root == "/"
}
