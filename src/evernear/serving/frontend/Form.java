package evernear;

import io.netty.channel.ChannelHandlerContext;
import io.netty.channel.ChannelInboundHandlerAdapter;
import io.netty.handler.codec.http.FullHttpRequest;
import io.netty.handler.codec.http.HttpHeaderNames;
import io.netty.handler.codec.http.HttpHeaderValues;
import io.netty.handler.codec.http.HttpResponseStatus;
import io.netty.handler.codec.http.HttpUtil;
import io.netty.handler.codec.http.multipart.DefaultHttpDataFactory;
import io.netty.handler.codec.http.multipart.HttpPostRequestDecoder;
import io.netty.handler.codec.http.multipart.HttpPostRequestDecoder.EndOfDataDecoderException;
import io.netty.handler.codec.http.multipart.InterfaceHttpData;
import io.netty.handler.codec.http.multipart.InterfaceHttpData.HttpDataType;
import io.netty.util.ReferenceCountUtil;
import java.util.Set;
import org.pytorch.serve.util.NettyUtils;

/**
 * Rejects forms that TorchServe cannot parse, for which it would return 500, and forms with several images, of which it
 * would answer one. A body that curl sends without a Content-Type is an image rather than a URL-encoded form.
 */
final class Form extends ChannelInboundHandlerAdapter {
    // FIELDS in request_parsing.py
    private static final Set<String> IMAGES = Set.of("body", "data", "image", "file");

    private final int maxSize;

    Form(int maxSize) {
        this.maxSize = maxSize;
    }

    @Override
    public void channelRead(ChannelHandlerContext context, Object message) {
        FullHttpRequest request = (FullHttpRequest) message;
        try {
            if (isUrlEncoded(request)) {
                request.headers().set(HttpHeaderNames.CONTENT_TYPE, HttpHeaderValues.APPLICATION_OCTET_STREAM);
            }
            if (!isMultipart(request) || countImages(request) <= 1) {
                context.fireChannelRead(message);
                return;
            }
            reject(context, message, "ManyImages", "The form has several images or files; send one image per request.");
        } catch (UnreadableException fault) {
            reject(
                    context,
                    message,
                    "BadForm",
                    "The form cannot be read; send the image as its field \"data\", or as the body.");
        }
    }

    private static void reject(ChannelHandlerContext context, Object message, String type, String sentence) {
        ReferenceCountUtil.release(message);
        context.writeAndFlush(Rejection.of(HttpResponseStatus.BAD_REQUEST, type, sentence));
    }

    private static boolean isUrlEncoded(FullHttpRequest request) {
        CharSequence type = HttpUtil.getMimeType(request);
        return HttpHeaderValues.APPLICATION_X_WWW_FORM_URLENCODED.contentEqualsIgnoreCase(type);
    }

    private static boolean isMultipart(FullHttpRequest request) throws UnreadableException {
        try {
            return HttpPostRequestDecoder.isMultipart(request);
        } catch (RuntimeException fault) {
            throw new UnreadableException();
        }
    }

    /** Parses forms exactly like TorchServe. */
    private int countImages(FullHttpRequest request) throws UnreadableException {
        int images = 0;
        try {
            HttpPostRequestDecoder form =
                    new HttpPostRequestDecoder(new DefaultHttpDataFactory(maxSize), request.duplicate());
            try {
                while (form.hasNext()) {
                    InterfaceHttpData field = form.next();
                    NettyUtils.getFormData(field);
                    if (field.getHttpDataType() == HttpDataType.FileUpload || IMAGES.contains(field.getName())) {
                        images++;
                    }
                }
            } catch (EndOfDataDecoderException end) {
                return images;
            } finally {
                form.cleanFiles();
                form.destroy();
            }
            return images;
        } catch (RuntimeException | AssertionError fault) {
            throw new UnreadableException();
        }
    }

    private static final class UnreadableException extends Exception {
        private static final long serialVersionUID = 1;
    }
}
