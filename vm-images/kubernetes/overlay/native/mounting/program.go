package mounting

import (
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// userTable is the file in which mount(8) keeps the options that the kernel does not know, such as _netdev.
const userTable = "/run/mount/utab"

// helperDirectories are the directories in which umount(8) searches programs such as umount.nfs.
var helperDirectories = []string{"/sbin", "/sbin/fs.d", "/sbin/fs", "/usr/sbin"}

// needsProgram returns true if umount(8) runs a helper for the file system at the target, or removes the target from
// the table of mount(8). It reads tables only: a system call on the target would hang with its server.
func needsProgram(target string) bool {
	path := withoutLinks(target)
	if table, err := os.ReadFile(userTable); err == nil && listed(string(table), path) {
		return true
	}
	return slices.ContainsFunc(helperNames(fstype(path)), func(name string) bool {
		return slices.ContainsFunc(helperDirectories, func(directory string) bool {
			return unix.Access(filepath.Join(directory, name), unix.X_OK) == nil
		})
	})
}

// withoutLinks returns the path with the symbolic links of its parent resolved.
func withoutLinks(target string) string {
	path, err := filepath.Abs(target)
	if err != nil {
		return target
	}
	parent, err := filepath.EvalSymlinks(filepath.Dir(path))
	if err != nil {
		return path
	}
	return filepath.Join(parent, filepath.Base(path))
}

// fstype returns the type of the file system that is mounted at the path, or "" if none is.
func fstype(path string) string {
	mounts, err := mountinfo.GetMounts(func(info *mountinfo.Info) (skip, stop bool) { return info.Mountpoint != path, false })
	if err != nil || len(mounts) == 0 {
		return ""
	}
	// The last one covers those before.
	return mounts[len(mounts)-1].FSType
}

// helperNames returns the names of the programs that umount(8) runs for a type of file system, such as `fuse.sshfs`.
func helperNames(fstype string) []string {
	if fstype == "" || strings.Contains(fstype, "/") {
		return nil
	}
	main, _, _ := strings.Cut(fstype, ".")
	return []string{"umount." + fstype, "umount." + main}
}

var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`, `\043`, "#")

// listed returns true if a line of the table of mount(8) has the target.
func listed(table, target string) bool {
	for word := range strings.FieldsSeq(table) {
		if path, isTarget := strings.CutPrefix(word, "TARGET="); isTarget && unescape.Replace(path) == target {
			return true
		}
	}
	return false
}
