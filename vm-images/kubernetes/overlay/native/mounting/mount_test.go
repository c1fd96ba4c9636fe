package mounting

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"loopfs.invalid/vm-images/kubernetes/overlay/internal/namespace"
)

func TestMain(m *testing.M) { namespace.Run(m) }

func makeDirectory(t *testing.T, elements ...string) string {
	t.Helper()
	path := filepath.Join(elements...)
	if err := os.MkdirAll(path, 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// mountsAt returns the properties of the mounts at a path that do not differ between two mounts made the same way.
func mountsAt(t *testing.T, path string) []string {
	t.Helper()
	mounts, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(path))
	if err != nil {
		t.Fatal(err)
	}
	var properties []string
	for _, mount := range mounts {
		optional := strings.FieldsFunc(mount.Optional, func(letter rune) bool { return letter >= '0' && letter <= '9' })
		vfs := strings.Split(mount.VFSOptions, ",")
		slices.Sort(vfs)
		properties = append(properties, strings.Join([]string{mount.Root, mount.Options, strings.Join(optional, "N"), mount.FSType, mount.Source, strings.Join(vfs, ",")}, " "))
	}
	return properties
}

// Each request is served once by mount(8) and once by system calls, on targets that are prepared alike.
func TestMountsAreThoseThatMountMakes(t *testing.T) {
	work := namespace.Tmpfs(t, "")
	source := makeDirectory(t, work, "source")
	makeDirectory(t, source, "below")
	if err := unix.Mount("tmpfs", filepath.Join(source, "below"), "tmpfs", unix.MS_NOSUID, ""); err != nil {
		t.Fatal(err)
	}
	restricted := makeDirectory(t, work, "restricted")
	if err := unix.Mount("tmpfs", restricted, "tmpfs", unix.MS_NOEXEC|unix.MS_NOATIME, ""); err != nil {
		t.Fatal(err)
	}
	shared := makeDirectory(t, work, "shared")
	if err := errors.Join(unix.Mount("tmpfs", shared, "tmpfs", 0, ""), unix.Mount("", shared, "", unix.MS_SHARED, "")); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(work, "link")
	if err := os.Symlink(source, link); err != nil {
		t.Fatal(err)
	}
	bind := func(source string, options ...string) Request { return Request{Source: source, Options: options} }
	tmpfs := func(options ...string) Request {
		return Request{Source: "tmpfs", FSType: "tmpfs", Options: options}
	}
	for _, requests := range [][]Request{
		{bind(source, "bind")},
		{bind(link, "bind")},
		{bind(source, "rbind")},
		{bind(source, "bind", "ro")},
		{bind(source, "bind", "ro", "nosuid", "nodev", "noexec", "noatime")},
		{bind(source, "bind", "rshared")},
		{bind(source, "bind", "rshared"), bind(source, "bind", "remount", "rslave")},
		{bind(source, "bind", "unbindable")},
		{bind(shared, "bind")},
		{bind(shared, "bind", "rslave")},
		{bind(shared, "bind", "slave", "shared")},
		{bind(shared, "bind"), bind(shared, "bind", "remount", "ro", "private")},
		{bind(source, "bind"), bind(source, "bind", "remount", "ro", "relatime")},
		{bind(restricted, "bind")},
		{bind(restricted, "bind"), bind(restricted, "bind", "remount", "ro", "noexec", "noatime")},
		{bind(restricted, "bind"), bind(restricted, "bind", "remount", "noexec", "strictatime")},
		{tmpfs()},
		{tmpfs("size=1048576")},
		{tmpfs("size=64k", "nr_inodes=20", "mode=0750", "uid=0", "gid=0", "noexec", "ro")},
		{tmpfs("size=1m"), tmpfs("remount", "size=2m", "nosuid")},
		{tmpfs("defaults", "rprivate")},
	} {
		reference, target := makeDirectory(t, work, "reference"), makeDirectory(t, work, "target")
		for _, request := range requests {
			arguments := []string{"-o", strings.Join(append([]string{"defaults"}, request.Options...), ",")}
			if request.FSType != "" {
				arguments = append(arguments, "-t", request.FSType)
			}
			if output, err := exec.Command("mount", append(arguments, request.Source, reference)...).CombinedOutput(); err != nil {
				t.Fatalf("%v: %v: %s", request, err, output)
			}
			request.Target = target
			if known, err := Mount(request); !known || err != nil {
				t.Fatalf("%v: %v %v", request, known, err)
			}
		}
		if expected, found := mountsAt(t, reference), mountsAt(t, target); !slices.Equal(expected, found) {
			t.Errorf("%v:\nmount(8) %q\nmount(2) %q", requests, expected, found)
		}
		for _, path := range []string{reference, target} {
			if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func TestABindMountKeepsItsRestrictionsWhenItGetsOthers(t *testing.T) {
	work := namespace.Tmpfs(t, "")
	target := makeDirectory(t, work, "target")
	for _, step := range []struct{ options, expected string }{
		{"bind", "rw,relatime"},
		{"bind,remount,noexec,nosymfollow", "rw,noexec,relatime,nosymfollow"},
		{"bind,remount,nodev,ro,noatime", "ro,nodev,noexec,noatime,nosymfollow"},
		{"bind,remount,nosuid", "ro,nosuid,nodev,noexec,noatime,nosymfollow"},
		{"bind,remount,rw,exec,symfollow", "rw,nosuid,nodev,noatime"},
	} {
		if known, err := Mount(Request{Source: work, Target: target, Options: strings.Split(step.options, ",")}); !known || err != nil {
			t.Fatal(step, known, err)
		}
		if found := strings.Fields(mountsAt(t, target)[0])[1]; found != step.expected {
			t.Errorf("%s: %s", step.options, found)
		}
	}
}

func TestASourceThatIsAnOpenFileIsMounted(t *testing.T) {
	work := namespace.Tmpfs(t, "")
	source, target := filepath.Join(work, "file"), filepath.Join(work, "target")
	for path, content := range map[string]string{source: "content", target: ""} {
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	file, err := os.Open(source)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	known, err := Mount(Request{
		Source: filepath.Join("/proc/self/fd", strconv.Itoa(int(file.Fd()))), Target: target,
		Options: []string{"bind"}, Arguments: []string{"--no-canonicalize"},
	})
	if !known || err != nil {
		t.Fatal(known, err)
	}
	if content, err := os.ReadFile(target); err != nil || string(content) != "content" {
		t.Fatal(string(content), err)
	}
}

func TestAFailedMountNamesSourceTargetAndErrnoButNoOption(t *testing.T) {
	work := namespace.Tmpfs(t, "")
	known, err := Mount(Request{Source: "tmpfs", Target: work + "/missing", FSType: "tmpfs", Options: []string{"mode=0123"}})
	if !known || !errors.Is(err, unix.ENOENT) || !strings.Contains(err.Error(), work+"/missing") || strings.Contains(err.Error(), "0123") {
		t.Fatal(known, err)
	}
}

func TestUnmountReportsMissingUnmountedAndBusyTargets(t *testing.T) {
	work := namespace.Tmpfs(t, "")
	directory := makeDirectory(t, work, "directory")
	for target, expected := range map[string]error{work + "/missing": unix.ENOENT, directory: unix.EINVAL} {
		if known, err := Unmount(target, 0); !known || !errors.Is(err, expected) || !strings.Contains(err.Error(), target) {
			t.Errorf("%s: %v %v", target, known, err)
		}
	}
	if err := unix.Mount("tmpfs", directory, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	file, err := os.Create(filepath.Join(directory, "file"))
	if err != nil {
		t.Fatal(err)
	}
	if known, err := Unmount(directory, 0); !known || !errors.Is(err, unix.EBUSY) {
		t.Fatal(known, err)
	}
	file.Close()
	if known, err := UnmountWithin(directory, 0, time.Minute); !known || err != nil {
		t.Fatal(known, err)
	}
	if mounts := mountsAt(t, directory); len(mounts) != 0 {
		t.Fatal(mounts)
	}
}

func TestALinkToAMountPointIsUnmountedAsUmountDoes(t *testing.T) {
	work := namespace.Tmpfs(t, "")
	directory, link := makeDirectory(t, work, "directory"), filepath.Join(work, "link")
	if err := os.Symlink(directory, link); err != nil {
		t.Fatal(err)
	}
	for _, unmount := range []func() error{
		func() error { return exec.Command("umount", link).Run() },
		func() error { _, err := Unmount(link, 0); return err },
	} {
		if err := unix.Mount("tmpfs", directory, "tmpfs", 0, ""); err != nil {
			t.Fatal(err)
		}
		if err := unmount(); err != nil {
			t.Fatal(err)
		}
		if mounts := mountsAt(t, directory); len(mounts) != 0 {
			t.Fatal(mounts)
		}
	}
}

func TestAnUnmountThatDoesNotReturnEndsWithTheDeadline(t *testing.T) {
	release := make(chan struct{})
	defer close(release)
	err := within(time.Nanosecond, func() error { <-release; return nil })
	if err != context.DeadlineExceeded {
		t.Fatal(err)
	}
}

func TestAnUnmountWithAHelperIsLeftToUmount(t *testing.T) {
	work := namespace.Tmpfs(t, "")
	helpers, target := makeDirectory(t, work, "helpers"), makeDirectory(t, work, "mounts", "target")
	if err := os.Symlink(filepath.Join(work, "mounts"), filepath.Join(work, "link")); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", target, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer func(directories []string) { helperDirectories = directories }(helperDirectories)
	helperDirectories = []string{helpers}
	paths := []string{target, filepath.Join(work, "link", "target"), target + "/"}
	for _, path := range paths {
		if needsProgram(path) {
			t.Fatalf("%s: there is no helper", path)
		}
	}
	if err := os.WriteFile(filepath.Join(helpers, "umount.tmpfs"), nil, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		if !needsProgram(path) {
			t.Errorf("%s: the helper was not found", path)
		}
		if known, err := Unmount(path, 0); known || err != nil {
			t.Errorf("%s: %v %v", path, known, err)
		}
	}
	if len(mountsAt(t, target)) != 1 {
		t.Error("the mount is gone")
	}
}

func TestHelpersAreThoseOfTheTypeAndOfItsFirstPart(t *testing.T) {
	for fstype, expected := range map[string][]string{
		"fuse.sshfs": {"umount.fuse.sshfs", "umount.fuse"},
		"nfs4":       {"umount.nfs4", "umount.nfs4"},
		"":           nil,
		"../x":       nil,
	} {
		if names := helperNames(fstype); !slices.Equal(names, expected) {
			t.Errorf("%s: %v", fstype, names)
		}
	}
}

func TestATargetInTheTableOfMountIsFound(t *testing.T) {
	table := "SRC=/dev/sda TARGET=/a\\040b ROOT=/ OPTS=_netdev\nSRC=x TARGET=/c\n"
	for target, expected := range map[string]bool{"/a b": true, "/c": true, "/a": false, "/": false} {
		if listed(table, target) != expected {
			t.Error(target)
		}
	}
}
