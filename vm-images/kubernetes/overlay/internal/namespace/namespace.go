// Package namespace runs tests in a mount namespace of their own, so that their mounts end with them.
package namespace

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

const variable = "LOOPFS_TEST_NAMESPACE"

// unavailable is the reason why Run could not enter a namespace.
var unavailable error

// Run runs the tests of a package in another process, which has a mount namespace of its own and, if this process is not
// root, also a user namespace. It ends the process. If the system refuses the namespaces, it runs the tests here, and
// Require skips those that need them.
func Run(m *testing.M) {
	if os.Getenv(variable) != "" {
		if err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			fmt.Fprintf(os.Stderr, "make the mounts private: %v\n", err)
			os.Exit(1)
		}
		os.Exit(m.Run())
	}
	command := exec.Command("/proc/self/exe", os.Args[1:]...)
	command.Env = append(os.Environ(), variable+"=1")
	command.Stdout, command.Stderr = os.Stdout, os.Stderr
	command.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}
	if os.Geteuid() != 0 {
		command.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
		command.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		command.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	if err := command.Start(); err != nil {
		unavailable = err
		os.Exit(m.Run())
	}
	if err := command.Wait(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Require skips the test if it does not run in a mount namespace of its own. For root, that is an error.
func Require(t *testing.T) {
	t.Helper()
	switch {
	case unavailable == nil:
	case os.Geteuid() == 0:
		t.Fatalf("enter a mount namespace as root: %v", unavailable)
	default:
		t.Skipf("this system has no user namespaces for this user, so the test needs root: %v", unavailable)
	}
}

// Tmpfs mounts a tmpfs for the test, and returns its path. The mount ends with the namespace.
func Tmpfs(t *testing.T, options string) string {
	t.Helper()
	Require(t)
	path := t.TempDir()
	if err := unix.Mount("tmpfs", path, "tmpfs", 0, options); err != nil {
		t.Fatalf("mount a tmpfs with %q: %v", options, err)
	}
	t.Cleanup(func() { unix.Unmount(path, unix.MNT_DETACH) })
	return path
}
